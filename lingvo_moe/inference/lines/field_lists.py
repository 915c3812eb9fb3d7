"""Lists of fields with semicolons between them: the keywords of a desktop entry, the header of a table.

A model that reads such a list as a whole drops some fields of many.
"""

from __future__ import annotations

import re

# Without a space after a semicolon, and without what belongs to entities, code and markup.
_IN_FIELD = r"[^;&()=<>{}%]"
_LIST = re.compile(rf"{_IN_FIELD}+(?:;(?!\s){_IN_FIELD}+){{2,}}")
SEPARATOR = ";"


def fields(text: str) -> list[str]:
    """Returns the fields of a list of three or more; of another text none."""
    return text.split(SEPARATOR) if _LIST.fullmatch(text) else []


def loses_a_field(text: str, translation: str) -> bool:
    """Returns whether a text is a list, and its translation has another number of fields, or an empty one."""
    listed, translated = fields(text), translation.split(SEPARATOR)
    return bool(listed) and (len(translated) != len(listed) or not all(map(str.strip, translated)))
