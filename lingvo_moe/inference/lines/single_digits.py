"""Numbers of one digit that stand alone: `Batterie 4`, `(5 Min.)`, `Python 3`.

Corpora have names of colours such as `Firebrick4`, and a model writes one for a label that it does not know and the
digit after it. Numbers with more digits are `kept_text.required`. A single digit may have an ending or a hyphen in
English (`5th`, `8-byte`), and a digit that the line lacks is no error: `ein Byte`, `1 byte`.
"""

from __future__ import annotations

import collections
import re
import unicodedata

from lingvo_moe.inference.lines.kept_text import required

_OPENING, _CLOSING = r"(\[{\"'„“«（「『【", r")\]}\"'“”».,:;!?）」』】。、，；：！？"
_ALONE = re.compile(rf"(?<![^\s{_OPENING}])\d(?=[{_CLOSING}]*(?:\s|\Z))")
_WRITTEN = re.compile(r"(?<![\w.,])\d(?![.,]?\d)")


def find(text: str) -> list[re.Match]:
    """Finds the numbers that a translation should have, outside of placeholders, tags and longer numbers."""
    alone = list(_ALONE.finditer(text))
    spans = [each.span() for each in required(text)] if alone else []
    return [found for found in alone if not any(start <= found.start() < end for start, end in spans)]


def loses_one(text: str, translation: str) -> bool:
    """Returns whether a translation lacks a number of its text."""
    wanted = collections.Counter(unicodedata.digit(found[0]) for found in find(text))
    return bool(wanted - collections.Counter(unicodedata.digit(found[0]) for found in _WRITTEN.finditer(translation)))
