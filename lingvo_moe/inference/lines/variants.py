"""Other ways to write a text: with a small first letter, and with a full stop.

A model that is in doubt about a title or a label may be confident of the same words inside of a sentence.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from lingvo_moe.inference.lines.kept_text import required

_HAS_END = re.compile(r"[^\w\s%]\Z")
# In Turkish, the small letter of I has no dot.
_IS_TURKIC = re.compile("I.*[ığİĞ]")
# Names such as iPhone; after these ends, the stop of an abbreviation is that of the sentence, too.
_NAME = re.compile(r"[a-z]+[A-Z]")
_ABBREVIATION = re.compile(r"(?:\b(?:etc|Inc|Ltd|Co)|\b\w\.\w|\.)\.\Z")


class Variant(NamedTuple):
    """A text that is written in another way.

    Attributes:
      text: the text.
      undo: changes a translation of it to one of the original.
    """

    text: str
    undo: Callable[[str], str]


def variants(text: str) -> list[Variant]:
    """Returns the other ways to write a text. A file name, placeholder or the like at its beginning is not changed."""
    found, first = [], text[:1].lower()
    # A second capital is that of an abbreviation. Of a Turkish İ, the small letter has two characters.
    has_small = text[:1] != first and len(first) == 1 and text[1:2].islower()
    if has_small and not _begins_with_kept(text) and not _IS_TURKIC.match(text):
        found.append(Variant(first + text[1:], _with_capital))
    if text and not _HAS_END.search(text):
        found.append(Variant(f"{text}.", _without_stop))
    return found


def _begins_with_kept(text: str) -> bool:
    return any(found.start() == 0 for found in required(text))


def _with_capital(translation: str) -> str:
    if _NAME.match(translation) or _begins_with_kept(translation):
        return translation
    return translation[:1].upper() + translation[1:]


def _without_stop(translation: str) -> str:
    return translation if _ABBREVIATION.search(translation) else translation.removesuffix(".")
