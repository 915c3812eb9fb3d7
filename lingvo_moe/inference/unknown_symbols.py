"""Symbols that the source tokenizer has no piece for, such as emoji: a model cannot read them, and the rest suffers.

A model that has not seen a symbol translates what follows it badly. So symbols are taken out before translation: those
at either end of a line are copied to the translation, and those inside are left out. Letters that are unknown remain:
they are part of words.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

from lingvo_moe.data.tokenizer import Tokenizer

# So, Sk: pictures, flags, skin tones. Cn, Co: pictures of a later Unicode, or of a font of its own.
_CATEGORIES = ("So", "Sk", "Cn", "Co")
# Joiners, variation selectors, the keycap and the tags of flags, which are part of a symbol after one.
_JOINERS = "\u200d\ufe0e\ufe0f\u20e3\U000e0020-\U000e007f"


class Framed(NamedTuple):
    """A line whose unknown symbols were taken out.

    Attributes:
      before, after: the symbols at its ends, with the spaces beside them.
      text: what is left, without spaces at its ends.
    """

    before: str
    text: str
    after: str

    def around(self, translation: str) -> str:
        """Returns a translation of `text` with the symbols at its ends."""
        return f"{self.before}{translation}{self.after}"


def take_out(lines: Sequence[str], tokenizer: Tokenizer) -> list[Framed]:
    """Takes the symbols that a tokenizer has no piece for out of each line.

    A line without them is returned as it is, as `text`.
    """
    symbols = sorted(character for character in set().union(*lines) if _is_unknown_symbol(character, tokenizer))
    if not symbols:
        return [Framed("", line, "") for line in lines]
    run = rf"(?:\s*[{re.escape(''.join(symbols))}][{_JOINERS}]*)+"
    whole = re.compile(rf"({run}\s*)?(.*?)({run}\s*)?", re.DOTALL)
    inside = re.compile(rf"{run}(?P<word>(?=[^\s,.;:!?…)\]]))?")
    return [_framed(line, whole, inside) for line in lines]


def _framed(line: str, whole: re.Pattern, inside: re.Pattern) -> Framed:
    if not inside.search(line):
        return Framed("", line, "")
    found = whole.fullmatch(line)
    assert found is not None  # its middle takes anything
    before, text, after = found.groups(default="")
    left = inside.sub(lambda found: " " if found["word"] is not None else "", text)
    return Framed(before, left.strip(), after)


def _is_unknown_symbol(character: str, tokenizer: Tokenizer) -> bool:
    return unicodedata.category(character) in _CATEGORIES and not tokenizer.has_pieces_for(character)
