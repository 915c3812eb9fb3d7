"""Numbers with a noun, for lines of output."""

from __future__ import annotations

from collections.abc import Sequence

_MAX_NAMED = 10  # lines; a long file may have hundreds


def counted(count: int, noun: str, plural: str = "") -> str:
    """Returns `1 step`, `2 steps`; `plural` if it is not the noun with an s."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def lines(numbers: Sequence[int]) -> str:
    """Returns `line 3`, `lines 3, 7` or, of many, the first ones and how many more there are; `` of none."""
    named = ", ".join(map(str, numbers[:_MAX_NAMED]))
    more = f" and {len(numbers) - _MAX_NAMED} more" if len(numbers) > _MAX_NAMED else ""
    return f"line{'s' * (len(numbers) > 1)} {named}{more}" if numbers else ""


def left_out(count: int, noun: str, which: str) -> str:
    """Returns a line that says what was left out: `2 sentences of 64 tokens or more were left out.`."""
    return f"{counted(count, noun)} {which} {'was' if count == 1 else 'were'} left out."


def file_size(size: int) -> str:
    """Returns a number of bytes with its unit: `12.3 MiB`, or `4.5 KiB` below one MiB."""
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"
