"""SentencePiece models as messages, whose pieces get our ids."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from lingvo_moe.data.tokenizer import SPECIAL_IDS
from lingvo_moe.errors import UserError

NAMES = {"pad": "<pad>", "eos": "</s>", "bos": "<s>", "unk": "<unk>"}
_NOT_IN_PIECES = re.compile("[\0\ud800-\udfff]")
_FIRST = ("<unk>", "<s>", "</s>")  # of models that fairseq or Marian reads, and of MADLAD-400's


def read(path: pathlib.Path, name: str, first: Sequence[str] = _FIRST, remedy: str = "copy it again") -> Any:
    """Reads a SentencePiece model as a message.

    Args:
      path: of the file.
      name: what messages call the directory.
      first: the pieces that the model begins with, which are special.
      remedy: what the message about other first pieces advises.

    Raises:
      UserError: which begins with `name`; the file is missing or corrupt, or begins with other pieces.
    """
    messages: Any = sentencepiece_model_pb2  # protobuf makes its classes when it is imported
    try:
        content = path.read_bytes()
        sentencepiece.SentencePieceProcessor().LoadFromSerializedProto(content)
    except OSError as error:
        raise UserError(
            f"{name}: cannot read {path.name} ({error.strerror}); copy the tokenizer's files, too."
        ) from None
    except RuntimeError:
        raise UserError(f"{name}: {path.name} is not a complete SentencePiece model; copy it again.") from None
    model = messages.ModelProto.FromString(content)
    if wrong := [piece.piece for piece in model.pieces if not isinstance(piece.piece, str)]:
        raise UserError(f"{name}: {path.name} has the piece {wrong[0]!r}, which is no text; copy it again.")
    if (found := [piece.piece for piece in model.pieces[: len(first)]]) != list(first):
        raise UserError(f"{name}: {path.name} begins with the pieces {found}; expected {list(first)}; {remedy}.")
    return model


def check_texts(texts: Iterable[str], where: str):
    """Raises UserError, which begins with `where`, for a text that no piece can have."""
    if wrong := [text for text in texts if not text or _NOT_IN_PIECES.search(text)]:
        raise UserError(f"{where} has the piece {wrong[0]!r}, which is no text; copy it again.")


def pieces_of(model: Any, path: pathlib.Path, name: str, first: Sequence[str] = _FIRST) -> dict[str, Any]:
    """Returns the pieces of a model by their text, without its `first` ones; raises UserError if there are none."""
    pieces = {piece.piece: piece for piece in model.pieces[len(first) :]}
    if not pieces:
        raise UserError(f"{name}: {path.name} has no pieces besides {list(first)}; copy it again.")
    return pieces


def piece(text: str, kind: str, score: float = 0.0) -> Any:
    """Returns a piece as a message; kinds are those of SentencePiece: `NORMAL`, `CONTROL`, `UNUSED`, for instance."""
    messages: Any = sentencepiece_model_pb2
    pieces = messages.ModelProto.SentencePiece
    return pieces(piece=text, type=pieces.Type.Value(kind), score=score)


def special_pieces() -> dict[int, Any]:
    """Returns the pieces with our special ids."""
    pieces = {number: piece(NAMES[special], "CONTROL") for special, number in SPECIAL_IDS.items()}
    return {**pieces, SPECIAL_IDS["unk"]: piece(NAMES["unk"], "UNKNOWN")}


def with_pieces(model: Any, pieces: list[Any], path: pathlib.Path, name: str) -> bytes:
    """Returns a model with other pieces, which begin with `special_pieces`.

    Raises:
      UserError: which begins with `name`; SentencePiece refuses the model: a piece is too long, for instance.
    """
    del model.pieces[:]
    model.pieces.extend(pieces)
    for special, number in SPECIAL_IDS.items():
        setattr(model.trainer_spec, f"{special}_id", number)
        setattr(model.trainer_spec, f"{special}_piece", NAMES[special])
    model.trainer_spec.vocab_size = len(pieces)
    content = model.SerializeToString(deterministic=True)
    try:
        sentencepiece.SentencePieceProcessor().LoadFromSerializedProto(content)
    except RuntimeError as error:
        raise UserError(
            f"{name}: {path.name} with the pieces of the JSON files is no SentencePiece model ({error}); copy the "
            f"files again."
        ) from None
    return content
