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
_KEYCAP = "\u20e3"
# Joiners, variation selectors, the keycap and the tags of flags, which are part of a symbol after one.
_JOINERS = "\u200d\ufe0e\ufe0f\u20e3\U000e0020-\U000e007f"
_CLOSING = tuple(",.;:!?…)]")


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
    characters = set().union(*lines)
    unknown = "".join(sorted(each for each in characters if _is_unknown_symbol(each, tokenizer)))
    symbols = [f"[{re.escape(unknown)}]"] if unknown else []
    if _KEYCAP in characters and not tokenizer.has_pieces_for(_KEYCAP):
        symbols.append(f"[0-9#*]\ufe0f?{_KEYCAP}")
    if not symbols:
        return [Framed("", line, "") for line in lines]
    symbol = f"(?:{'|'.join(symbols)})[{_JOINERS}]*"
    run = re.compile(rf"{symbol}(?:\s*{symbol})*")
    return [_framed(line, run) for line in lines]


def _framed(line: str, run: re.Pattern) -> Framed:
    spans = [found.span() for found in run.finditer(line)]
    if not spans:
        return Framed("", line, "")
    begin, end = 0, len(line)
    if not line[: spans[0][0]].strip():
        begin = end - len(line[spans.pop(0)[1] :].lstrip())
    if spans and not line[spans[-1][1] :].strip():
        end = len(line[: spans[-1][0]].rstrip())
    return Framed(line[:begin], _joined(run.split(line[begin:end])), line[end:])


def _joined(parts: list[str]) -> str:
    """Returns the parts of a line between its symbols, with one space between words."""
    joined = [parts[0]]
    for part in parts[1:]:
        joined[-1] = joined[-1].rstrip()
        joined.append(part if part[:1].isspace() or part[:1] in _CLOSING else f" {part}")
    return "".join(joined).strip()


def _is_unknown_symbol(character: str, tokenizer: Tokenizer) -> bool:
    return unicodedata.category(character) in _CATEGORIES and not tokenizer.has_pieces_for(character)
