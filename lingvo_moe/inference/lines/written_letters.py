r"""Letters that are written as entities or escapes: `L&ouml;schen` or `L\u00f6schen` for `Löschen`."""

from __future__ import annotations

import html
import re

_ENTITY_OR_ESCAPE = re.compile(r"&(?:#\d{1,7}|#[xX][0-9A-Fa-f]{1,6}|[A-Za-z]{2,31});|(?<!\\)\\u[0-9A-Fa-f]{4}")


def decode(line: str) -> str:
    """Returns the line with the letters themselves; other characters, such as `&lt;`, stay as they are written."""
    return _ENTITY_OR_ESCAPE.sub(lambda found: _letter(found[0]), line) if "&" in line or "\\u" in line else line


def _letter(written: str) -> str:
    character = html.unescape(written) if written[0] == "&" else chr(int(written[len("\\u") :], 16))
    return character if character.isalpha() else written
