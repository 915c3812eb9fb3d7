r"""Divides a line at what is copied as it is: white space at its ends, tabs, and escapes such as `\n`.

In the corpora, escapes are the characters that they stand for, and white space is a single space; a model has hardly
seen others.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from lingvo_moe.data.cleaning import ENTITY
from lingvo_moe.inference.kept_text import KEPT, has_words

_RUN = re.compile(r"(?:\s|(?<!\\)\\[nrt])++")
# More than spaces: tabs, line ends, escapes.
_IS_SEPARATOR = re.compile(r"[\t-\r\x1c-\x1f\x85\u2028\u2029\\]")
_LONGEST_ESCAPE = 2
# In Greek, a question mark, which a model makes of it in other languages, too.
_FINAL_SEMICOLON = re.compile(r"\s*+;\Z")
_GREEK = re.compile("[Ͱ-Ͽἀ-῾]")


class LineParts(NamedTuple):
    """The parts of a line.

    Attributes:
      texts: what is to be translated, at least one text; of a line without words, an empty one.
      between: what is before, between and after the texts.
    """

    texts: list[str]
    between: list[str]

    def around(self, translations: list[str]) -> str:
        """Returns the line with a translation in the place of each text."""
        first, *others = self.between
        return first + "".join(part for pair in zip(translations, others, strict=True) for part in pair)


def divide(line: str) -> LineParts:
    """Divides a line; a part without words is not translated."""
    texts, between, end = [], [""], 0
    for separator in [*_separators(line), None]:
        start, stop = separator.span() if separator else (len(line), len(line))
        text = line[end:start]
        if has_words(text):
            texts.append(text)
            between.append(line[start:stop])
        else:
            between[-1] += text + line[start:stop]
        end = stop
    if not texts:
        return LineParts([""], [*between, ""])
    if semicolon := _final_semicolon(texts[-1]):
        between[-1] = texts[-1][semicolon:] + between[-1]
        texts[-1] = texts[-1][:semicolon]
    return LineParts(texts, between)


def _separators(line: str) -> list[re.Match]:
    """Returns the white space at the ends of a line, and inside of it tabs and escapes with the spaces beside them."""
    runs = [
        run for run in _RUN.finditer(line) if run.start() == 0 or run.end() == len(line) or _IS_SEPARATOR.search(run[0])
    ]
    # Not in `C:\new`.
    kept = [found.span() for found in KEPT.finditer(line) if len(found[0]) > _LONGEST_ESCAPE] if runs else []
    return [run for run in runs if not any(start < run.start() < end for start, end in kept)]


def _final_semicolon(text: str) -> int | None:
    """Returns where the semicolon that ends a text begins, which is none of an entity or of Greek; None without it."""
    if (
        not text.endswith(";")
        or _GREEK.search(text)
        or any(found.end() == len(text) for found in ENTITY.finditer(text))
    ):
        return None
    found = _FINAL_SEMICOLON.search(text)
    return found.start() if found and found.start() else None
