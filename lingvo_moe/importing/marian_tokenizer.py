"""The tokenizers of Marian's translators, of the Opus-MT models, as ours: one for each side, with the same ids.

Hugging Face's files are two SentencePiece models, source.spm and target.spm, and vocab.json, which numbers the pieces
of both: `</s>` 0, `<unk>` 1, the pieces, and `<pad>` last, with which the decoder's input begins, too. Ours have the
special ids of `data.tokenizer`, so the two pieces whose ids these are follow all others.

A piece that vocab.json lacks is left out. Hugging Face reads it as unknown; here, the text is read in other pieces. A
character that only the SentencePiece model of the other side has is read as that piece, as there; of several in a row,
which that model reads as one unknown piece, each is.
"""

from __future__ import annotations

import pathlib
import re
from typing import Any

import numpy as np

from lingvo_moe.data.tokenizer import SIDES, SPECIAL_IDS, UNKNOWN_LANGUAGE, Tokenizer
from lingvo_moe.errors import UserError
from lingvo_moe.importing import sentencepiece_models
from lingvo_moe.importing.model_directory import read_json
from lingvo_moe.importing.sentencepiece_models import NAMES, piece

_VOCABULARY, _CONFIG = "vocab.json", "tokenizer_config.json"
_FILES = {"source": "source.spm", "target": "target.spm"}
_FIRST = {NAMES["eos"]: 0, NAMES["unk"]: 1}
_OF_TARGET = re.compile(">>.*<<")  # a piece that begins sources, and says what to translate into
_LANGUAGE = re.compile("[a-z]{2,3}(?:_[A-Za-z]{2,8})?")
_PENALTY = 10.0  # how much less the score of an unknown character is than the least of a piece, in SentencePiece


def rows_of_ids(size: int) -> np.ndarray:
    """Returns the rows of Marian's table with our ids, in the order of these.

    Args:
      size: V, the number of Marian's ids. Ours are one more: the decoder's input begins with bos, which has the
        embedding of Marian's padding.
    """
    padding, special = size - 1, [0] * len(SPECIAL_IDS)
    theirs = {"pad": padding, "bos": padding, "eos": _FIRST[NAMES["eos"]], "unk": _FIRST[NAMES["unk"]]}
    for name, number in SPECIAL_IDS.items():
        special[number] = theirs[name]
    displaced = range(len(_FIRST), len(SPECIAL_IDS))
    return np.array([*special, *range(len(SPECIAL_IDS), padding), *displaced])


def convert(directory: pathlib.Path, name: str) -> dict[str, Tokenizer]:
    """Reads the tokenizers of a model's directory, by side.

    Args:
      directory: of the model.
      name: what messages call it, like `--input=DIR`.

    Raises:
      UserError: a file is missing or corrupt, or the model translates into several languages.
    """
    texts = _read_vocabulary(directory, name)
    languages = _languages(directory, name)
    if several := [text for text in texts if _OF_TARGET.fullmatch(text)]:
        raise UserError(
            f"{name}: {_VOCABULARY} has {several[0]!r}, so the model translates into several languages; only those "
            f"into one can be imported."
        )
    ours = [texts[row] for row in rows_of_ids(len(texts))]
    return {side: _of_side(directory / file, ours, languages[side], name) for side, file in _FILES.items()}


def _of_side(file: pathlib.Path, texts: list[str], language: str, name: str) -> Tokenizer:
    """Returns the tokenizer of one side, in which longer pieces that only the other side has are unused."""
    model = sentencepiece_models.read(file, name)
    pieces = sentencepiece_models.pieces_of(model, file, name)
    special = sentencepiece_models.special_pieces()
    least = min(each.score for each in pieces.values()) - _PENALTY

    def of_other_side(text: str) -> Any:
        return piece(text, "NORMAL", least) if len(text) == 1 else piece(text, "UNUSED")

    ours = [special.get(number) or pieces.get(text) or of_other_side(text) for number, text in enumerate(texts)]
    if not any(text in pieces for text in texts):
        raise UserError(f"{name}: {file.name} and {_VOCABULARY} have no piece in common; copy the files again.")
    tokenizer = Tokenizer(sentencepiece_models.with_pieces(model, ours, file, name), own_language=language)
    tokenizer.check(file)
    return tokenizer


def _read_vocabulary(directory: pathlib.Path, name: str) -> list[str]:
    """Returns the texts of the pieces in the order of their ids."""
    ids = read_json(directory / _VOCABULARY, name)
    last = {NAMES["pad"]: len(ids) - 1}
    is_complete = all(type(number) is int for number in ids.values()) and sorted(ids.values()) == list(range(len(ids)))
    if not is_complete or len(ids) <= len(SPECIAL_IDS) or {**ids, **_FIRST, **last} != ids:
        raise UserError(
            f"{name}: {_VOCABULARY} does not number {', '.join(_FIRST)}, then the pieces and last {NAMES['pad']}, as "
            f"Opus-MT's does; copy it again."
        )
    sentencepiece_models.check_texts(ids, f"{name}: {_VOCABULARY}")
    return sorted(ids, key=ids.__getitem__)


def _languages(directory: pathlib.Path, name: str) -> dict[str, str]:
    """Returns the languages of both sides."""
    config = read_json(directory / _CONFIG, name) if (directory / _CONFIG).exists() else {}
    found = {side: config.get(f"{side}_lang") for side in SIDES}
    return {
        side: language if isinstance(language, str) and _LANGUAGE.fullmatch(language) else UNKNOWN_LANGUAGE
        for side, language in found.items()
    }
