"""Dates of Chinese, Japanese and Korean texts, `2024年3月12日` and `2024년 3월 12일`, as `2024-03-12`.

A model makes other days and months of them, and copies the latter.
"""

from __future__ import annotations

import re

_DATE = re.compile(r"(?<!\d)(\d{4})\s?(?:年\s?(\d{1,2})\s?月\s?(\d{1,2})\s?日|년\s?(\d{1,2})\s?월\s?(\d{1,2})\s?일)")
_MONTHS, _DAYS = 12, 31


def with_numbers(line: str) -> str:
    """Returns the line with such dates in numbers alone (ISO 8601)."""
    return _DATE.sub(_in_numbers, line)


def _in_numbers(found: re.Match) -> str:
    year, month, day = (int(each) for each in found.groups() if each)
    if not (1 <= month <= _MONTHS and 1 <= day <= _DAYS):
        return found[0]
    return f"{year:04}-{month:02}-{day:02}"
