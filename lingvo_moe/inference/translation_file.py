"""The file of `eval --translations`: a line for each held-out sentence, its fields separated by tabs."""

from __future__ import annotations

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
    expected, lines = len(Line._fields), []
    try:
        with open(path, encoding="utf-8", newline="\n") as file:
            for number, text in enumerate(file, start=1):
                fields = text.rstrip("\n").split("\t")
                if len(fields) != expected:
                    raise UserError(
                        f"--translations={path}: line {number} has {len(fields)} fields; expected the {expected} of "
                        f"`eval --translations`: {', '.join(Line._fields)}."
                    )
                lines.append(Line(*fields))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--translations={path}: {getattr(error, 'strerror', None) or error}.") from None
    return lines
