"""The file of `eval --translations`: a line for each held-out sentence, its fields separated by tabs."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable
from typing import NamedTuple

from lingvo_moe.errors import UserError
from lingvo_moe.inference.evaluation import Translated
from lingvo_moe.utils import output_files


class Line(NamedTuple):
    """The fields of a line, in this order; runs of white space in them are single spaces."""

    language: str
    confidence: str
    source: str
    translation: str
    reference: str


def write(path: str, sentences: Iterable[Translated]):
    """Writes a line for each sentence."""
    with output_files.atomic_writer(path) as file:
        for one in sentences:
            best = one.translation
            line = Line(one.language, f"{best.confidence:.4f}", one.source, best.text, one.reference)
            print("\t".join(" ".join(field.split()) for field in line), file=file)


def read(path: str) -> list[Line]:
    """Returns the lines of a file; raises UserError if it cannot be read, or for a line with other fields."""
    try:
        texts = pathlib.Path(path).read_bytes().removesuffix(b"\n").split(b"\n")
    except OSError as error:
        raise UserError(f"--translations={path}: {error.strerror}.") from None
    return [_line(path, number, text) for number, text in enumerate(texts, start=1)]


def _line(path: str, number: int, text: bytes) -> Line:
    try:
        fields = text.decode("utf-8").split("\t")
    except UnicodeDecodeError as error:
        raise UserError(
            f"--translations={path}: line {number} is not UTF-8 (byte {error.start + 1} of the line); expected a "
            f"file of `eval --translations`."
        ) from None
    if len(fields) != len(Line._fields):
        raise UserError(
            f"--translations={path}: line {number} has {len(fields)} fields; expected the {len(Line._fields)} of "
            f"`eval --translations`: {', '.join(Line._fields)}."
        )
    return Line(*fields)
