"""Lists of fields with semicolons or bars between them: the keywords of a desktop entry, the header of a table.

A model that reads such a list as a whole drops some fields of many.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# Without a space after a separator, and without what belongs to entities, code and markup.
_IN_FIELD = r"[^;|&()=<>{}%]"
_LIST = re.compile(rf"{_IN_FIELD}+([;|])(?!\s){_IN_FIELD}+(?:\1(?!\s){_IN_FIELD}+)+")


class FieldList(NamedTuple):
    """The fields of a list, and what is between them."""

    fields: list[str]
    separator: str


def divide(text: str) -> FieldList | None:
    """Returns the fields of a list of three or more; None of another text."""
    found = _LIST.fullmatch(text)
    return FieldList(text.split(found[1]), found[1]) if found else None


def loses_a_field(text: str, translation: str) -> bool:
    """Returns whether a text is a list, and its translation has another number of fields, or an empty one."""
    listed = divide(text)
    if listed is None:
        return False
    translated = translation.split(listed.separator)
    return len(translated) != len(listed.fields) or not all(map(str.strip, translated))
