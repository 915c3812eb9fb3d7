"""The tokenizer of MADLAD-400 as ours: the source begins with the language of its translation.

Hugging Face's file is spiece.model, whose pieces have the ids of the model: `<unk>` 0, `<s>` 1, which pads, `</s>` 2,
and then the others, `<2de>` among them. The decoder's input begins with `<unk>`, here, too. Ours have the special ids
of `data.tokenizer`, of which bos has no place there, and is not used here; so all others are larger by one.

There, `<2de> ` is written before a text; it is read as the piece of a space and that of the language, and both are what
our sources begin with. Elsewhere in a text, `<2de>` is no language here.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import sentencepiece

from lingvo_moe.data.tokenizer import SPECIAL_IDS, UNKNOWN_LANGUAGE, Tokenizer
from lingvo_moe.errors import UserError
from lingvo_moe.importing import sentencepiece_models
from lingvo_moe.importing.sentencepiece_models import piece

FILE = "spiece.model"
IDS = {"unk": 0, "pad": 1, "eos": 2}  # of MADLAD-400
_LANGUAGE = re.compile("<2[A-Za-z_]+>")


def rows_of_ids(size: int) -> np.ndarray:
    """Returns the rows of their table of this size with our ids, in the order of these."""
    ours = IDS | {"bos": IDS["unk"]}
    special = [ours[name] for name in sorted(SPECIAL_IDS, key=SPECIAL_IDS.__getitem__)]
    return np.concatenate([special, np.arange(len(IDS), size)])


def convert(directory: pathlib.Path, name: str) -> dict[str, Tokenizer]:
    """Reads the tokenizers of both sides, by side; those of targets have no pieces for languages.

    Args:
      directory: of the model.
      name: what messages call it, like `--input=DIR`.

    Raises:
      UserError: the file is missing or corrupt, or has no languages: it is that of another model of T5's class.
    """
    file = directory / FILE
    model = sentencepiece_models.read(file, name)
    pieces = list(sentencepiece_models.pieces_of(model, file, name).values())
    languages = [each.piece for each in pieces if _LANGUAGE.fullmatch(each.piece)]
    if not languages:
        raise UserError(
            f"{name}: {FILE} has no pieces for languages, such as <2de>; of models of T5's class, only those of "
            f"MADLAD-400 can be imported."
        )
    before = _before_language(model.SerializeToString(), languages, name)
    if before and before not in {each.piece for each in pieces}:
        raise UserError(
            f"{name}: {FILE} reads {before!r} before a language, which is none of its pieces; copy it again."
        )
    source, target = (_with_languages(pieces, kind) for kind in ("CONTROL", "UNUSED"))
    found = {
        "source": Tokenizer(
            sentencepiece_models.with_pieces(model, source, file, name),
            own_language=UNKNOWN_LANGUAGE,
            names_target=True,
            before_language=before,
        ),
        "target": Tokenizer(sentencepiece_models.with_pieces(model, target, file, name), own_language=UNKNOWN_LANGUAGE),
    }
    for tokenizer in found.values():
        tokenizer.check(file)
    return found


def _before_language(model: bytes, languages: Sequence[str], name: str) -> str:
    """Returns the piece that a language at the beginning of a text is read with; empty for none."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    found = set()
    for language, read in zip(languages, processor.encode(list(languages), out_type=str), strict=True):
        if len(read) > 2 or read[-1] != language:
            raise UserError(f"{name}: {FILE} reads {language} as the pieces {read}; expected one for the language.")
        found.add("".join(read[:-1]))
    if len(found) > 1:
        raise UserError(f"{name}: {FILE} reads some languages with a piece before them, and others without.")
    return found.pop()


def _with_languages(pieces: Sequence[Any], kind: str) -> list[Any]:
    """Returns the pieces of our ids, those of languages of another kind."""
    special = sentencepiece_models.special_pieces()
    others = [piece(each.piece, kind) if _LANGUAGE.fullmatch(each.piece) else each for each in pieces]
    return [*(special[number] for number in sorted(special)), *others]
