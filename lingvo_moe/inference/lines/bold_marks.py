"""Bold text of Markdown, `**Datei**`: a model reads it as `<b>Datei</b>`, as corpora have it; it writes `**` badly."""

from __future__ import annotations

import re
from typing import NamedTuple

_BOLD = re.compile(r"(?<!\*)\*\*(?![\s*])([^*]+?)(?<!\s)\*\*(?!\*)")
_MARK, _OPENING, _CLOSING = "**", "<b>", "</b>"
_TAG = re.compile(r"<\s*/?\s*b\s*>", re.IGNORECASE)


class Tagged(NamedTuple):
    """A text with tags for the marks of bold text.

    Attributes:
      text: the text.
      has_marks: whether the tags stand for marks.
    """

    text: str
    has_marks: bool = False

    def mark(self, translation: str) -> str:
        """Returns a translation with marks for its tags."""
        return _TAG.sub(_MARK, translation) if self.has_marks else translation


def tag(text: str) -> Tagged:
    """Puts tags in the place of marks; a text with marks without a pair, or with tags of its own, stays as it is."""
    tagged = _BOLD.sub(rf"{_OPENING}\1{_CLOSING}", text)
    if tagged == text or _MARK in tagged or _TAG.search(text):
        return Tagged(text)
    return Tagged(tagged, True)
