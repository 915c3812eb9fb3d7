"""Aligned pieces: names are split alike on both sides, words of the source stay whole, and no text is unknown."""

from __future__ import annotations

import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2

from lingvo_moe.data.corpus import Corpus
from lingvo_moe.data.tokenizer import SPECIAL_IDS, Tokenizer
from lingvo_moe.data.vocabularies import aligned_pieces, tokenizer_trainer
from lingvo_moe.errors import UserError
from lingvo_moe.testing.corpora import write_corpus

# Log-probabilities as in real models: characters are rare, and "Lo", "ad" and "Load" are about as frequent as words.
_LETTERS = dict.fromkeys("▁" + string.ascii_letters, -12.0)
_SOURCE = {**_LETTERS, "ö": -12.0, "▁löschen": -9.0, "▁Datei": -8.5, "▁py": -11.0, "Lo": -8.0, "ad": -7.5, "ung": -7.0}
_TARGET = {**_LETTERS, "▁delete": -9.0, "▁file": -8.0, "▁py": -10.5, "Load": -14.0}


def model(scores: dict[str, float]) -> bytes:
    """A unigram model of these pieces."""
    messages: Any = sentencepiece_model_pb2
    kind = messages.ModelProto.SentencePiece
    proto = messages.ModelProto()
    proto.trainer_spec.model_type = messages.TrainerSpec.UNIGRAM
    for name, number in SPECIAL_IDS.items():
        setattr(proto.trainer_spec, f"{name}_id", number)
        setattr(proto.trainer_spec, f"{name}_piece", f"<{name}>")
        proto.pieces.add(piece=f"<{name}>", type=kind.UNKNOWN if name == "unk" else kind.CONTROL)
    for piece, score in scores.items():
        proto.pieces.add(piece=piece, score=score)
    return proto.SerializeToString()


def pieces(tokenizer: Tokenizer) -> list[str]:
    return tokenizer.pieces(range(tokenizer.vocabulary_size))


def splits(tokenizer: Tokenizer, text: str) -> list[str]:
    return tokenizer.pieces(tokenizer.encode([text])[0])


def align(size: int = 100) -> Tokenizer:
    return Tokenizer(aligned_pieces.align(model(_SOURCE), model(_TARGET), size))


def test_a_name_is_split_as_in_the_target():
    """A model copies it piece by piece; before, the source's own pieces were more probable."""
    target = Tokenizer(model(_TARGET))
    assert splits(target, "pyLoad") == ["▁py", "Load"]
    assert splits(Tokenizer(model(_SOURCE)), "pyLoad") == ["▁py", "Lo", "ad"]
    assert splits(align(), "pyLoad") == ["▁py", "Load"]


def test_words_of_the_source_stay_whole():
    """Its own pieces cost more, but less than the pieces of the target that would take their place."""
    for word in ("löschen", "Datei"):
        assert splits(align(), word) == ["▁" + word]


def test_the_source_has_all_pieces_of_the_target_and_special_ids_first():
    """Of a piece of both sides the greater log-probability counts."""
    aligned = align()
    assert pieces(aligned)[:4] == [f"<{name}>" for name in SPECIAL_IDS]
    assert set(pieces(aligned)) == {*pieces(aligned)[:4], *_SOURCE, *_TARGET}
    messages: Any = sentencepiece_model_pb2
    scores = {p.piece: p.score for p in messages.ModelProto.FromString(aligned.model).pieces}
    assert scores["▁py"] == -10.5 and scores["▁file"] == -8.0 and scores["▁Datei"] < -8.5


def test_the_least_probable_of_the_sources_own_pieces_make_room():
    """Its characters stay."""
    needed = len(SPECIAL_IDS) + len(set(_TARGET)) + len("ö")
    assert set(pieces(align(needed + 1))) - set(pieces(align(needed))) == {"ung"}
    assert set(pieces(align(needed + 2))) - set(pieces(align(needed))) == {"ung", "ad"}
    assert "ö" in pieces(align(needed))
    with pytest.raises(UserError, match=f"--source_vocabulary={needed - 3} .* --align_pieces: .* need 3 pieces more"):
        align(needed - 3)


@given(st.text(string.ascii_letters + "ö ", min_size=1, max_size=30))
def test_no_text_is_unknown_or_changed(text):
    """Whatever the tokenizer of the source could encode."""
    aligned = align()
    assert Tokenizer.unk_id not in aligned.encode([text])[0]
    assert aligned.decode(aligned.encode([text])) == Tokenizer(model(_SOURCE)).decode(
        Tokenizer(model(_SOURCE)).encode([text])
    )


def test_trained_tokenizers_are_aligned_on_request(tmp_path):
    """The target is as without it, the source falls back to bytes; the setting belongs to the tokenizer's identity."""
    pairs = [(f"Haus Nummer {i} über dem Weg.", f"House number {i} above the road.") for i in range(300)]
    corpus = Corpus.open(write_corpus(tmp_path / "corpus", {"de": {"train": pairs}}))

    def train(output: str, aligned: bool):
        sizes = {"source": 500, "target": 100}
        return tokenizer_trainer.train(corpus, tmp_path / output, sizes, 1.0, 300, align_pieces=aligned)

    apart, aligned = train("apart", False)[0], train("aligned", True)[0]
    assert aligned.target == apart.target and aligned.source != apart.source
    assert set(pieces(aligned.target)[4:]) <= set(pieces(aligned.source))
    assert aligned.source.decode(aligned.source.encode(["日本語"])) == ["日本語"]
    assert train("aligned", True)[1] is False
    with pytest.raises(UserError, match="a tokenizer of another corpus or of other flags"):
        train("aligned", False)
