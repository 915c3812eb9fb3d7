"""Lines in capitals: corpora of software have few, so a model reads the same line in lower case far better.

`readings` has such a line both ways, and the more confident translation is written in capitals.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from lingvo_moe.data.cleaning import ENTITY, PLACEHOLDER
from lingvo_moe.inference.addresses import ADDRESS

_TAG = re.compile(r"</?[A-Za-z][^<>]*>")
# A program reads these; their case has a meaning.
_KEPT = re.compile(f"{_TAG.pattern}|{ENTITY.pattern}|{ADDRESS.pattern}|{PLACEHOLDER.pattern}")
# Up to its first letter.
_SENTENCE_START = re.compile(r"(?:\A|[.!?…][\"'»”)]*\s)[^\w]*[^\W\d_]")
_TURKIC = ("İ", "Ğ")
_TURKIC_LOWER = str.maketrans({"I": "ı", "İ": "i"})


def lower_case(text: str) -> str | None:
    """Returns a line in capitals in lower case, with a capital at the beginning of sentences; None for any other line.

    Placeholders, tags, entities and addresses stay as they are, and do not count. An `İ` or `Ğ` makes the line Turkish,
    which has a dotless small letter for `I`.
    """
    letters = [character for character in _KEPT.sub(" ", text) if character.isalpha()]
    # Other letters have no case: a Japanese line with a name in capitals is not in capitals.
    if sum(map(str.isupper, letters)) < 2 or any(not letter.isupper() for letter in letters):
        return None
    if any(letter in text for letter in _TURKIC):
        text = _outside(text, lambda part: part.translate(_TURKIC_LOWER))
    lowered = list(_outside(text, str.lower))
    without_kept = _KEPT.sub(lambda kept: " " * len(kept[0]), "".join(lowered))
    for start in _SENTENCE_START.finditer(without_kept):
        lowered[start.end() - 1] = lowered[start.end() - 1].upper()
    return "".join(lowered)


def upper_case(text: str) -> str:
    """Returns a text in capitals, except for its placeholders, tags, entities and addresses."""
    return _outside(text, str.upper)


def _outside(text: str, change: Callable[[str], str]) -> str:
    """Returns the text with everything changed but what is kept."""
    changed, end = [], 0
    for kept in _KEPT.finditer(text):
        changed += [change(text[end : kept.start()]), kept[0]]
        end = kept.end()
    return "".join([*changed, change(text[end:])])
