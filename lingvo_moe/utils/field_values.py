"""Values of a dataclass's fields, from the texts of flags: one notation wherever a user may set a field."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from typing import Any

from lingvo_moe.errors import UserError
from lingvo_moe.ranges import Range

_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_EXPECTED = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
_MOST_DIGITS = 18


def no_other_kind(where: str, text: str, kind: Any) -> typing.NoReturn:
    """Raises UserError: the field is of a type that has no text."""
    del text, kind
    raise UserError(f"{where}: a field of this type cannot be set by a flag.")


def whole_number(text: str, allowed: Range) -> int | None:
    """Returns the whole number that a text of digits stands for; None for another text, or a number out of range."""
    # Python refuses to read thousands of digits.
    if not (text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS):
        return None
    return number if (number := int(text)) in allowed else None


def parse(where: str, text: str, kind: Any, other: Callable[[str, str, Any], Any] = no_other_kind) -> Any:
    """Reads the value of a field.

    Args:
      where: what the user wrote, with which errors begin.
      text: of the value; `none` is None if `kind` allows that.
      kind: the field's type: int, float, bool, str, one that `other` reads, or one of these or None.
      other: reads values of other types; called with `where`, `text` and the type, without `| None`.

    Raises:
      UserError: `text` is no value of this type.
    """
    if isinstance(kind, types.UnionType):
        if text.lower() == "none":
            return None
        kind = next(one for one in typing.get_args(kind) if one is not types.NoneType)
    if kind not in _EXPECTED:
        return other(where, text, kind)
    try:
        return _BOOLEANS[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise UserError(f"{where}: expected {_EXPECTED[kind]}.") from None
