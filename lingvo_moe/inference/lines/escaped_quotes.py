r"""Quotes with a backslash, as in source code: `\"Datei\"`. A model reads them without it."""

from __future__ import annotations

import re
from typing import NamedTuple

_QUOTES = "\"'"


class Unescaped(NamedTuple):
    """A text without the backslashes before its quotes.

    Attributes:
      text: the text.
      quotes: which quotes had a backslash.
    """

    text: str
    quotes: str

    def escape(self, translation: str) -> str:
        """Returns a translation with backslashes before the same quotes, but for those that the model wrote."""
        if not self.quotes:
            return translation
        # Two backslashes are one of the text, after which a quote has none.
        return re.sub(rf"(?<!\\)((?:\\\\)*)([{self.quotes}])", r"\1\\\2", translation)


def unescape(text: str) -> Unescaped:
    """Removes the backslashes before a kind of quote, unless the text has quotes of this kind without one, too."""
    quotes = "".join(quote for quote in _QUOTES if _is_escaped(quote, text))
    return Unescaped(re.sub(rf"\\([{quotes}])", r"\1", text) if quotes else text, quotes)


def _is_escaped(quote: str, text: str) -> bool:
    return 0 < text.count(quote) == len(re.findall(rf"(?<!\\)\\{quote}", text))
