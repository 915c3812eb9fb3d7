"""Source pieces that agree with target pieces: names, which both sides spell alike, are split alike on both.

Two tokenizers that are trained apart split "pyLoad" into "py L o ad" and "py Load", and a model must learn to copy each
such name. Here the source tokenizer has all target pieces besides its own, and its own cost more, so that it uses them
where they save pieces: in the words of its own languages.
"""

from __future__ import annotations

from typing import Any

from sentencepiece import sentencepiece_model_pb2

from lingvo_moe.errors import UserError

# Nats. More splits more names alike, and words of the source languages into more pieces: of the words that both sides
# of held-out pairs have and training has at most three times, 37 % are split alike without this, 57 % with 0, 72 % with
# 3 and 85 % with 6; a Spanish, Portuguese or Italian word has 1.43, 1.43, 1.47 and 1.59 pieces (m4.Quickstart's sizes).
_COST = 3.0


def align(source: bytes, target: bytes, size: int) -> bytes:
    """Returns a source tokenizer with the target tokenizer's pieces, of at most `size` pieces.

    If necessary, the least probable of the source's own pieces make room; its characters and bytes stay. Both are
    unigram models (Kudo 2018), whose segmentation is the one of the greatest sum of log-probabilities.

    Args:
      source: a SentencePiece model.
      target: another one, with the same normalization.
      size: the number of pieces, including special ones.

    Raises:
      UserError: the source's vocabulary has no room for the target's.
    """
    messages: Any = sentencepiece_model_pb2  # protobuf makes its classes when it is imported
    model = messages.ModelProto.FromString(source)
    normal = messages.ModelProto.SentencePiece.NORMAL
    special = [piece for piece in model.pieces if piece.type != normal]
    own = {piece.piece: piece.score for piece in model.pieces if piece.type == normal}
    targets = {p.piece: p.score for p in messages.ModelProto.FromString(target).pieces if p.type == normal}
    scores = {text: max(score, own.get(text, score)) for text, score in targets.items()}
    scores |= {text: score for text, score in own.items() if len(text) == 1 and text not in targets}
    room = size - len(special) - len(scores)
    if room < 0:
        raise UserError(
            f"--source_vocabulary={size} is too small for --align_pieces: the characters of the source and the "
            f"{len(targets)} pieces of the target need {-room} pieces more. Pass a larger --source_vocabulary, or "
            "a smaller --target_vocabulary."
        )
    others = _by_score({text: score - _COST for text, score in own.items() if text not in scores})[:room]
    del model.pieces[:]
    model.pieces.extend(special)
    for text, score in _by_score({**scores, **dict(others)}):
        model.pieces.add(piece=text, score=score)
    return model.SerializeToString(deterministic=True)


def _by_score(scores: dict[str, float]) -> list[tuple[str, float]]:
    """Returns pieces and scores, the most probable first."""
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))
