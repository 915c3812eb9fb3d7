"""Short addresses in the place of text that must be kept, such as URLs, e-mail addresses and placeholders.

A model copies these piece by piece, and loses or translates some pieces. It copies `http://1` and `http://2` reliably.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_SHORT = "http://{}"
_ANY_SHORT = re.compile(r"http://(\d+)")


class Shortened(NamedTuple):
    """A text with short addresses, and what they stand for, in order."""

    text: str
    originals: tuple[str, ...]


def shorten(text: str, found: Iterable[re.Match]) -> Shortened:
    """Puts a short address in the place of each match in the text; equal ones get different addresses."""
    parts, originals, end = [], [], 0
    for each in found:
        originals.append(each[0])
        parts += [text[end : each.start()], _SHORT.format(len(originals))]
        end = each.end()
    return Shortened("".join([*parts, text[end:]]), tuple(originals))


def is_unambiguous(inputs: Sequence[str], originals: tuple[str, ...], is_cut: bool = False) -> bool:
    """Returns whether `restore` finds each short address of a text, and nothing else that looks like one.

    A digit of the text after a short address would become a part of it, and a text may have `xhttp://1` of its own.

    Args:
      inputs: the parts of the text, in order.
      originals: what its short addresses stand for.
      is_cut: whether inputs lack the ends of sentences, and what short addresses these have.
    """
    found = [number for text in inputs for number in short_numbers(text)]
    return found == list(range(1, len(found if is_cut else originals) + 1))


def short_numbers(text: str) -> list[int]:
    """Returns the numbers of the short addresses in a text, in its order."""
    return [int(each) for each in _ANY_SHORT.findall(text)]


def restore(translation: str, originals: tuple[str, ...]) -> str:
    """Puts the originals back; a short address that stands for none stays."""
    return _ANY_SHORT.sub(
        lambda found: originals[int(found[1]) - 1] if 1 <= int(found[1]) <= len(originals) else found[0], translation
    )
