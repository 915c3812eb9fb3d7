"""Lines in capitals: corpora of software have few, so a model reads the same line in lower case far better.

`Translator` reads such a line both ways, and writes the more confident translation in capitals.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from lingvo_moe.data.cleaning import ENTITY, PLACEHOLDER

_TAG = re.compile(r"</?[A-Za-z][^<>]*>")
# A program reads these; their case has a meaning.
_KEPT = re.compile(f"{_TAG.pattern}|{ENTITY.pattern}|{PLACEHOLDER.pattern}")
_TURKIC = ("İ", "Ğ")
_TURKIC_LOWER = str.maketrans({"I": "ı", "İ": "i"})


def lower_case(text: str) -> str | None:
    """Returns a line in capitals in lower case, with a capital at its beginning; None for any other line.

    Placeholders, tags and entities stay as they are, and do not count. An `İ` or `Ğ` makes the line Turkish, which has
    a dotless small letter for `I`.
    """
    letters = [character for character in _KEPT.sub(" ", text) if character.isalpha()]
    # Other letters have no case: a Japanese line with a name in capitals is not in capitals.
    if sum(map(str.isupper, letters)) < 2 or any(not letter.isupper() for letter in letters):
        return None
    if any(letter in text for letter in _TURKIC):
        text = _outside(text, lambda part: part.translate(_TURKIC_LOWER))
    lowered = _outside(text, str.lower)
    first = next((kept.end() for kept in [_KEPT.match(lowered)] if kept), 0)
    place = next((i for i in range(first, len(lowered)) if lowered[i].islower()), None)
    return lowered if place is None else lowered[:place] + lowered[place].upper() + lowered[place + 1 :]


def upper_case(text: str) -> str:
    """Returns a text in capitals, except for its placeholders, tags and entities."""
    return _outside(text, str.upper)


def _outside(text: str, change: Callable[[str], str]) -> str:
    """Returns the text with everything changed but placeholders, tags and entities."""
    changed, end = [], 0
    for kept in _KEPT.finditer(text):
        changed += [change(text[end : kept.start()]), kept[0]]
        end = kept.end()
    return "".join([*changed, change(text[end:])])
