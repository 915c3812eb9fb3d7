"""Formats that stand for the values of a program in turn: `%s` of printf, `{}` of Python and Rust.

A translation in which they change places would show the wrong values, or crash the program. Where English has another
order, they are numbered: `In %s wurden %d Fehler gefunden` becomes `Found %2$d errors in %1$s`. The printf of C
(POSIX), Java, PHP, Perl and Ruby reads that; others do not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from lingvo_moe.inference.lines.kept_text import required

_OF_PRINTF = re.compile(r"%([-+#0]*\d*(?:\.\d+)?(?:hh?|ll?|[Lqjzt])?[diouxXeEfFgGaAcsp@])")
_NUMBERED = re.compile(r"%\d+\$|%\d+\Z|\{\d+\}|%\[|.*\*")
_EMPTY = "{}"
_NUMBERED_PRINTF = re.compile(r"%(\d+)\$([-+#0]*\d*(?:\.\d+)?(?:hh?|ll?|[Lqjzt])?[diouxXeEfFgGaAcsp@])")
_NUMBERED_BRACES = re.compile(r"\{(\d+)\}")


def formats(text: str) -> list[str]:
    """Returns the formats of values in turn, in order; none if the text has those of two kinds, or numbered ones."""
    return [found[0] for found in _found(text)]


def number(text: str) -> str:
    """Returns the text with numbers in its formats."""
    return _with_numbers(text, range(len(formats(text))))


def number_as(text: str, translation: str) -> str:
    """Returns a translation of a text with numbers in its formats, if they are those of the text in another order.

    Where two are equal, which of them is which is not known, and none gets a number.
    """
    wanted, found = formats(text), formats(translation)
    if wanted == found or len(set(wanted)) < len(wanted) or sorted(wanted) != sorted(found):
        return translation
    return _with_numbers(translation, [wanted.index(each) for each in found])


def without_numbers(translation: str) -> str:
    """Returns a translation of what `number` returned without the numbers, if they are in order."""
    for pattern in (_NUMBERED_PRINTF, _NUMBERED_BRACES):
        numbers = [int(found[1]) for found in pattern.finditer(translation)]
        if numbers and numbers == list(range(numbers[0], numbers[0] + len(numbers))):
            return pattern.sub(lambda found: f"%{found[2]}" if len(found.groups()) > 1 else _EMPTY, translation)
    return translation


def has_more_numbers(text: str, translation: str) -> bool:
    """Returns whether a translation has numbered formats and its text has none."""
    patterns = (_NUMBERED_PRINTF, _NUMBERED_BRACES)
    return any(pattern.search(translation) and not pattern.search(text) for pattern in patterns)


def _with_numbers(text: str, numbers: Iterable[int]) -> str:
    """Returns the text with these numbers, which count from 0, in its formats."""
    parts, end = [], 0
    for number, each in zip(numbers, _found(text), strict=True):
        numbered = f"{{{number}}}" if each[0] == _EMPTY else f"%{number + 1}${each[0][1:]}"
        parts += [text[end : each.start()], numbered]
        end = each.end()
    return "".join([*parts, text[end:]])


def _found(text: str) -> list[re.Match]:
    if "%" not in text and _EMPTY not in text:  # as in most texts
        return []
    placeholders = [each for each in required(text) if each.lastgroup == "placeholder" and each[0] != "%%"]
    if any(_NUMBERED.match(each[0]) for each in placeholders):
        return []
    of_printf = [each for each in placeholders if _OF_PRINTF.fullmatch(each[0])]
    empty = [each for each in placeholders if each[0] == _EMPTY]
    return [] if of_printf and empty else of_printf or empty
