"""Complete dates, `12. März 2024` and `2024年3月12日`, as `2024-03-12`.

A model makes other days and months of them, as its corpora have few; it copies those in numbers alone.
"""

from __future__ import annotations

import functools
import re

_IN_CHARACTERS = re.compile(
    r"(?<!\d)(\d{4})\s?(?:年\s?(\d{1,2})\s?月\s?(\d{1,2})\s?日|년\s?(\d{1,2})\s?월\s?(\d{1,2})\s?일)"
)
_TIME = re.compile(r"(\d{1,2})\s?[時时点點시]\s?(\d{1,2})\s?[分분]")
_MONTH = r"([^\W\d_]{3,})\.?"
# `1er mai 2024`, `3 de mayo de 2024`, `5 lutego 2023 r.`, and Cyrillic ends of a year.
_DAY_FIRST = re.compile(
    rf"(?<![\d.,:/-])(\d{{1,2}})(?:\.|º|er)?\s(?:de\s|d['’])?{_MONTH},?\s(?:de\s|del\s)?(\d{{4}})(?!\d)"
    r"(?:\s(?:г\.|р\.|r\.|года|року|roku))?"
)
_YEAR_FIRST = re.compile(rf"(?<!\d)(\d{{4}})(?:\.|\sm\.)\s{_MONTH}\s(\d{{1,2}})(?:\.|\sd\.)")  # Hungarian, Lithuanian
_NAMED_IN = (
    "ar ast be bg bs ca cs da de el eo es et eu fi fr gl he hr hu id it lt lv mk nb nl nn pl pt ro ru sk sl sr sv tr uk"
)
_MONTHS, _DAYS = 12, 31


def with_numbers(line: str) -> str:
    """Returns the line with such dates in numbers alone (ISO 8601), and times such as `9時15分` as `9:15`."""
    line = _TIME.sub(_time, line)
    line = _IN_CHARACTERS.sub(lambda found: _iso(found, *(int(each) for each in found.groups() if each)), line)
    line = _DAY_FIRST.sub(lambda found: _iso(found, int(found[3]), _month(found[2]), int(found[1])), line)
    return _YEAR_FIRST.sub(lambda found: _iso(found, int(found[1]), _month(found[2]), int(found[3])), line)


def _time(found: re.Match) -> str:
    is_after_date = found.string[: found.start()].endswith(("日", "일"))
    return f"{' ' if is_after_date else ''}{found[1]}:{found[2]:0>2}"


def _iso(found: re.Match, year: int, month: int, day: int) -> str:
    if not (1 <= month <= _MONTHS and 1 <= day <= _DAYS):
        return found[0]
    return f"{year:04}-{month:02}-{day:02}"


def _month(name: str) -> int:
    """Returns the number of a month; 0 for another word, and for a name of two months in two languages (listopad)."""
    return _months().get(name.casefold(), 0)


@functools.cache
def _months() -> dict[str, int]:
    """The months of all languages by name, in the forms of a date and of a title."""
    from babel.dates import get_month_names  # for the few lines with a word between two numbers

    numbers: dict[str, set[int]] = {}
    for language in _NAMED_IN.split():
        for context in ("format", "stand-alone"):
            for number, name in get_month_names("wide", context, language).items():
                numbers.setdefault(name.casefold(), set()).add(number)
    return {name: number for name, (number, *others) in numbers.items() if not others}
