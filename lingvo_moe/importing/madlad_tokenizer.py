"""The tokenizer of MADLAD-400 as ours: the source begins with the language of its translation.

Hugging Face's file is spiece.model, whose pieces have the ids of the model: `<unk>` 0, `<s>` 1, which pads, `</s>` 2,
and then the others, `<2de>` among them. The decoder's input begins with `<unk>`, here, too. Ours have the ids of
`t5_models.rows_of_ids`.

There, `<2de> ` is written before a text; it is read as the piece of a space and that of the language, and both are what
our sources begin with. Elsewhere in a text, `<2de>` is no language here. Nor are other pieces of this form, such as
`<2translate>` and `<2Latn>`.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Sequence
from typing import Any

import sentencepiece

from lingvo_moe.data.tokenizer import UNKNOWN_LANGUAGE, Tokenizer
from lingvo_moe.errors import UserError
from lingvo_moe.importing import sentencepiece_models
from lingvo_moe.importing.sentencepiece_models import piece

FILE = "spiece.model"
IDS = {"unk": 0, "pad": 1, "eos": 2}  # of MADLAD-400
_TAG = re.compile("<2.*>")
_LANGUAGE = re.compile("<2[a-z]{2,3}(?:_[A-Z][a-z]{3})?(?:_[A-Z]{2})?>")  # perhaps with a script or a region
_ONLY = "of models of T5's class, only those of MADLAD-400 can be imported"


def convert(directory: pathlib.Path, name: str) -> dict[str, Tokenizer]:
    """Reads the tokenizers of both sides, by side; those of targets have no pieces for languages.

    Args:
      directory: of the model.
      name: what messages call it, like `--input=DIR`.

    Raises:
      UserError: the file is missing or corrupt, or has no languages: it is that of another model of T5's class.
    """
    file = directory / FILE
    model = sentencepiece_models.read(file, name, remedy=_ONLY)
    pieces = list(sentencepiece_models.pieces_of(model, file, name).values())
    languages = [each.piece for each in pieces if _LANGUAGE.fullmatch(each.piece)]
    if not languages:
        raise UserError(f"{name}: {FILE} has no pieces for languages, such as <2de>; {_ONLY}.")
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
    """Returns the pieces of our ids, those of languages of another kind, and other tags unused."""
    special = sentencepiece_models.special_pieces()

    def converted(each: Any) -> Any:
        if not _TAG.fullmatch(each.piece):
            return each
        return piece(each.piece, kind if _LANGUAGE.fullmatch(each.piece) else "UNUSED")

    return [*(special[number] for number in sorted(special)), *map(converted, pieces)]
