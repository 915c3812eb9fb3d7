"""The tokenizers of Marian's translators, of the Opus-MT models, as ours: one for each side, with the same ids.

Hugging Face's files are two SentencePiece models, source.spm and target.spm, and vocab.json, which numbers the pieces
of both, with `</s>`, `<unk>` and `<pad>` among them: in older models first and last, in others anywhere. The decoder's
input begins with `<pad>`. Ours have the special ids of `data.tokenizer`, and then the other pieces in the same order.
A model that translates into several languages has a piece for each, `>>fra<<`, which begins the source.

A piece that vocab.json lacks is left out. Hugging Face reads it as unknown; here, the text is read in other pieces. A
character that only the SentencePiece model of the other side has is read as that piece, as there; of several in a row,
which that model reads as one unknown piece, each is.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from lingvo_moe.data.pair_languages import is_group
from lingvo_moe.data.tokenizer import SIDES, SPECIAL_IDS, UNKNOWN_LANGUAGE, Tokenizer
from lingvo_moe.errors import UserError
from lingvo_moe.importing import sentencepiece_models
from lingvo_moe.importing.model_directory import read_json
from lingvo_moe.importing.sentencepiece_models import NAMES, piece

VOCABULARY, _CONFIG = "vocab.json", "tokenizer_config.json"
_FILES = {"source": "source.spm", "target": "target.spm"}
_SPECIAL = ("eos", "unk", "pad")
_OF_TARGET = re.compile(">>.+<<")  # a piece that begins sources, and says what to translate into
_LANGUAGE = re.compile("[a-z]{2,3}(?:_[A-Za-z]{2,8})?")
_PENALTY = 10.0  # how much less the score of an unknown character is than the least of a piece, in SentencePiece


def special_ids(texts: Sequence[str]) -> dict[str, int]:
    """Returns Marian's ids of eos, unk and pad, from the texts of `read_vocabulary`."""
    return {special: texts.index(NAMES[special]) for special in _SPECIAL}


def rows_of_ids(texts: Sequence[str]) -> np.ndarray:
    """Returns the rows of Marian's table with our ids, in the order of these.

    Args:
      texts: of `read_vocabulary`, V of them. Our ids are one more: the decoder's input begins with bos, which has the
        embedding of Marian's padding.
    """
    theirs = special_ids(texts)
    theirs["bos"] = theirs["pad"]
    special = [theirs[name] for name in sorted(SPECIAL_IDS, key=SPECIAL_IDS.__getitem__)]
    return np.array([*special, *(row for row in range(len(texts)) if row not in special)])


def convert(directory: pathlib.Path, texts: Sequence[str], name: str) -> dict[str, Tokenizer]:
    """Reads the tokenizers of a model's directory, by side.

    Args:
      directory: of the model.
      texts: of `read_vocabulary`.
      name: what messages call it, like `--input=DIR`.

    Raises:
      UserError: a file is missing or corrupt.
    """
    languages = _languages(directory, name)
    rows: list[int] = rows_of_ids(texts).tolist()
    ours = [texts[row] for row in rows]
    has_several = any(map(_OF_TARGET.fullmatch, texts))
    if has_several:
        languages["target"] = UNKNOWN_LANGUAGE
    models = {side: _model_of_side(directory / file, ours, side, name) for side, file in _FILES.items()}
    found = {side: Tokenizer(model, own_language=languages[side]) for side, model in models.items()}
    found["source"] = dataclasses.replace(found["source"], names_target=has_several)
    for side, tokenizer in found.items():
        tokenizer.check(_FILES[side])
    return found


def _model_of_side(file: pathlib.Path, texts: Sequence[str], side: str, name: str) -> bytes:
    """Returns the model of one side, in which longer pieces that only the other side has are unused.

    So are languages, which begin sources and are never a part of other texts.
    """
    model = sentencepiece_models.read(file, name)
    pieces = sentencepiece_models.pieces_of(model, file, name)
    special = sentencepiece_models.special_pieces()
    least = min(each.score for each in pieces.values()) - _PENALTY

    def converted(number: int, text: str) -> Any:
        if number in special:
            return special[number]
        if _OF_TARGET.fullmatch(text):
            return piece(text, "CONTROL" if side == "source" else "UNUSED")
        of_other_side = piece(text, "NORMAL", least) if len(text) == 1 else piece(text, "UNUSED")
        return pieces.get(text) or of_other_side

    ours = [converted(number, text) for number, text in enumerate(texts)]
    if not any(text in pieces for text in texts):
        raise UserError(f"{name}: {file.name} and {VOCABULARY} have no piece in common; copy the files again.")
    return sentencepiece_models.with_pieces(model, ours, file, name)


def read_vocabulary(directory: pathlib.Path, name: str) -> list[str]:
    """Returns the texts of the pieces of vocab.json, in the order of their ids.

    Args:
      directory: of the model.
      name: what messages call it, like `--input=DIR`.

    Raises:
      UserError: the file is missing or corrupt.
    """
    ids = read_json(directory / VOCABULARY, name)
    is_complete = all(type(number) is int for number in ids.values()) and sorted(ids.values()) == list(range(len(ids)))
    special = [NAMES[each] for each in _SPECIAL]
    if not is_complete or not ids.keys() > set(special):
        raise UserError(
            f"{name}: {VOCABULARY} does not number {', '.join(special)} and pieces from 0 on, each once; copy it again."
        )
    sentencepiece_models.check_texts(ids, f"{name}: {VOCABULARY}")
    return sorted(ids, key=ids.__getitem__)


def _languages(directory: pathlib.Path, name: str) -> dict[str, str]:
    """Returns the languages of both sides; UNKNOWN_LANGUAGE where a side has several."""
    config = read_json(directory / _CONFIG, name) if (directory / _CONFIG).exists() else {}
    return {side: _language_of(config.get(f"{side}_lang")) for side in SIDES}


def _language_of(name: Any) -> str:
    is_one = isinstance(name, str) and _LANGUAGE.fullmatch(name) and not is_group(name)
    return name if is_one else UNKNOWN_LANGUAGE
