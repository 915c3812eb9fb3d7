"""Addresses (URLs, e-mail) in a line: a model copies them piece by piece, and loses or translates some pieces.

`readings` has a line with `http://1`, `http://2` in their places, which are copied, and then puts the addresses back.
Where a translation lacks one, that of the line as it is is used.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from lingvo_moe.inference.kept_text import ADDRESS

_SHORT = "http://{}"
_ANY_SHORT = re.compile(r"http://(\d+)")


class Shortened(NamedTuple):
    """A text with short addresses in place of its own, which are `addresses`, in order."""

    text: str
    addresses: tuple[str, ...]


def shorten(text: str) -> Shortened:
    """Puts a short address in the place of each; equal addresses get different ones."""
    addresses: list[str] = []

    def short(found: re.Match) -> str:
        addresses.append(found[0])
        return _SHORT.format(len(addresses))

    return Shortened(ADDRESS.sub(short, text), tuple(addresses))


def restore(translation: str, addresses: tuple[str, ...]) -> tuple[str, bool]:
    """Puts the addresses back.

    Returns:
      (the translation with its own addresses, whether it has each of them once and no other).
    """
    numbers = [int(found[1]) for found in _ANY_SHORT.finditer(translation)]
    is_complete = sorted(numbers) == list(range(1, len(addresses) + 1))
    whole = _ANY_SHORT.sub(
        lambda found: addresses[int(found[1]) - 1] if 1 <= int(found[1]) <= len(addresses) else found[0], translation
    )
    return whole, is_complete
