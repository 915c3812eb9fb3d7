"""Other ways to write a text: with a small first letter, and with a full stop.

A model that is in doubt about a title or a label may be confident of the same words inside of a sentence.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

_HAS_END = re.compile(r"[^\w\s%]\Z")


class Variant(NamedTuple):
    """A text that is written in another way.

    Attributes:
      text: the text.
      undo: changes a translation of it to one of the original.
    """

    text: str
    undo: Callable[[str], str]


def variants(text: str) -> list[Variant]:
    """Returns the other ways to write a text."""
    found, first = [], text[:1].lower()
    # A second capital is that of an abbreviation. Of a Turkish İ, the small letter has two characters.
    if text[:1] != first and len(first) == 1 and text[1:2].islower():
        found.append(Variant(first + text[1:], _with_capital))
    if text and not _HAS_END.search(text):
        found.append(Variant(f"{text}.", _without_stop))
    return found


def _with_capital(translation: str) -> str:
    return translation[:1].upper() + translation[1:]


def _without_stop(translation: str) -> str:
    return translation[:-1] if translation.endswith(".") and not translation.endswith("..") else translation
