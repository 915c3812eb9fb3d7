"""Values of a dataclass's fields, from the texts of flags: one notation wherever a user may set a field."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from typing import Any

from lingvo_moe.errors import UserError

_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_EXPECTED = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def no_other_kind(where: str, text: str, kind: Any) -> typing.NoReturn:
    """Raises UserError: the field is of a type that has no text."""
    del text, kind
    raise UserError(f"{where}: a field of this type cannot be set by a flag.")


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
