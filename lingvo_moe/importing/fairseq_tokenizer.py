"""The tokenizers of M2M-100 and NLLB-200 as ours: a SentencePiece model with our special ids and a piece per language.

Hugging Face's files are a SentencePiece model of the pieces, which lacks padding and languages, and JSON files. Ids are
those of fairseq: `<s>` 0, `<pad>` 1, `</s>` 2, `<unk>` 3, then the pieces, then the languages. NLLB-200's pieces are in
the order of the SentencePiece model; M2M-100's have the ids of vocab.json. Ours have the special ids of
`data.tokenizer`; all others are the same.

vocab.json may lack pieces of the SentencePiece model. Hugging Face reads these as unknown. Here they are unused pieces,
which SentencePiece splits into smaller ones; single characters are unknown.
"""

from __future__ import annotations

import collections
import pathlib
from typing import Any

import numpy as np

from lingvo_moe.data.tokenizer import SPECIAL_IDS, Tokenizer
from lingvo_moe.errors import UserError
from lingvo_moe.importing import sentencepiece_models
from lingvo_moe.importing.model_directory import read_json
from lingvo_moe.importing.sentencepiece_models import NAMES, piece

_PIECES = "sentencepiece.bpe.model"
_FAIRSEQ = {"bos": 0, "pad": 1, "eos": 2, "unk": 3}
_MASK = "<mask>"
_VOCABULARY = "vocab.json"
_MOST_UNUSED = 1024  # ids between those of pieces and languages; of a corrupt file


def rows_of_ids(size: int) -> np.ndarray:
    """Returns the rows of fairseq's table of this size with our ids, in the order of these."""
    rows = np.arange(size)
    for name, number in SPECIAL_IDS.items():
        rows[number] = _FAIRSEQ[name]
    return rows


def convert(directory: pathlib.Path, name: str) -> Tokenizer:
    """Reads the tokenizer of a model's directory.

    Args:
      directory: of the model.
      name: what messages call it, like `--input=DIR`.

    Raises:
      UserError: a file is missing or corrupt, or it is the tokenizer of a model of another kind.
    """
    model = sentencepiece_models.read(directory / _PIECES, name)
    pieces = sentencepiece_models.pieces_of(model, directory / _PIECES, name)
    by_id, missing = _pieces_by_id(pieces, directory, name)
    added = _added(directory, name, first=max(by_id) + 1)
    _check_ids(added, by_id, name)
    by_id |= {number: piece(text, "UNUSED" if text == _MASK else "CONTROL") for number, text in added.items()}
    by_id |= sentencepiece_models.special_pieces()
    ours = [by_id.get(number) or piece(f"<unused {number}>", "UNUSED") for number in range(max(by_id) + 1)] + missing
    if twice := [text for text, count in collections.Counter(each.piece for each in ours).items() if count > 1]:
        raise UserError(f"{name}: {twice[0]!r} is a piece of {_PIECES} and a token of the JSON files; copy them again.")
    tokenizer = Tokenizer(sentencepiece_models.with_pieces(model, ours, directory / _PIECES, name))
    tokenizer.check(directory / _PIECES)
    if not tokenizer.languages:
        raise UserError(f"{name}: its tokenizer has no languages; expected that of M2M-100, NLLB-200 or NLLB-MoE.")
    return tokenizer


def _pieces_by_id(pieces: dict[str, Any], directory: pathlib.Path, name: str) -> tuple[dict[int, Any], list[Any]]:
    """Returns the pieces by id, and unused ones for those without an id."""
    if not (directory / _VOCABULARY).exists():
        return dict(enumerate(pieces.values(), start=_FAIRSEQ["unk"] + 1)), []
    ids = _read_vocabulary(directory, name)
    by_id = {number: pieces.get(text) or piece(text, "UNUSED") for text, number in ids.items()}
    without = [text for text in pieces if text not in ids and len(text) > 1]
    return by_id, [piece(text, "UNUSED", pieces[text].score) for text in without]


def _check_ids(added: dict[int, str], by_id: dict[int, Any], name: str):
    """Raises UserError for tokens with ids of pieces, or far from these."""
    if wrong := sorted(added.keys() & by_id.keys()):
        raise UserError(
            f"{name}: the id {wrong[0]} is that of {added[wrong[0]]!r} and of the piece {by_id[wrong[0]].piece!r}; "
            f"{_PIECES} and the JSON files are not of the same model."
        )
    least, most = min([*by_id, *added]), max([*by_id, *added])
    if least < 0 or most > len(by_id) + len(added) + _MOST_UNUSED:
        raise UserError(f"{name}: the JSON files have ids from {least} to {most}; copy them again.")


def _read_vocabulary(directory: pathlib.Path, name: str) -> dict[str, int]:
    """Returns the ids of pieces in vocab.json, without special ids."""
    ids = read_json(directory / _VOCABULARY, name)
    special = {text: _FAIRSEQ[each] for each, text in NAMES.items()}
    others = {text: number for text, number in ids.items() if text not in special}
    numbers, first = list(others.values()), len(special)
    is_complete = all(type(number) is int for number in numbers) and sorted(numbers) == list(
        range(first, first + len(numbers))
    )
    sentencepiece_models.check_texts(others, f"{name}: {_VOCABULARY}")
    if {text: ids.get(text) for text in special} != special or not is_complete:
        raise UserError(
            f"{name}: {_VOCABULARY} does not number {', '.join(special)} and then all pieces, as M2M-100's does; "
            f"copy it again."
        )
    return others


def _added(directory: pathlib.Path, name: str, first: int) -> dict[int, str]:
    """Returns the ids and names of what the SentencePiece model lacks, but for special ids.

    Files of different versions of the library have them: tokenizer.json; tokenizer_config.json; or, in order from the
    id `first` on, special_tokens_map.json.
    """
    readers = {
        "tokenizer.json": lambda content: {
            int(entry["id"]): _text(entry["content"]) for entry in content.get("added_tokens", [])
        },
        "tokenizer_config.json": lambda content: {
            int(number): _text(entry["content"]) for number, entry in content.get("added_tokens_decoder", {}).items()
        },
        "special_tokens_map.json": lambda content: {
            number: _text(entry if isinstance(entry, str) else entry["content"])
            for number, entry in enumerate(content.get("additional_special_tokens", []), start=first)
        },
    }
    special = {*_FAIRSEQ.values()}
    for file, read in readers.items():
        content = read_json(directory / file, name) if (directory / file).exists() else {}
        try:
            found = {number: text for number, text in sorted(read(content).items()) if number not in special}
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            raise UserError(f"{name}: {file} does not list tokens as it should; copy the files again.") from None
        if {*found.values()} - {_MASK}:
            return found
    return {}


def _text(content: Any) -> str:
    """Returns the name of a token; raises ValueError if it is none."""
    if not isinstance(content, str) or not content or not content.isprintable():
        raise ValueError(f"{content!r} is not the name of a token")
    return content
