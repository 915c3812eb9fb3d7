"""The JSON files that the page is made of: each is replaced by a complete one, or stays; what is read is checked."""

from __future__ import annotations

import collections.abc
import dataclasses
import json
import pathlib
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from lingvo_moe.errors import UserError
from lingvo_moe.utils import output_files

Record = TypeVar("Record")
_MOST = 1e30  # larger than any figure of a plan or a measurement


def save(content: Any, path: pathlib.Path):
    """Writes plain values as JSON."""
    with output_files.atomic_writer(str(path)) as file:
        file.write(f"{json.dumps(content, indent=1)}\n")


def load(flag: str, path: pathlib.Path, tool: str, make: Callable[[Any], list[Record]]) -> list[Record]:
    """Reads the results of a tool.

    Args:
      flag: that names the file, for the errors.
      path: of the file.
      tool: the module that writes it.
      make: makes dataclasses of the content; raises ValueError, TypeError, KeyError or AttributeError for another one.

    Raises:
      UserError: there is no such file, it is another one, it has no results, or one of a wrong type.
    """
    try:
        records = make(json.loads(path.read_text(encoding="utf-8")))
        if not records:
            raise ValueError("there are no results")
        for record in records:
            if wrong := mistyped(record):
                raise ValueError(f"wrong type of {', '.join(wrong)}")
    except OSError as error:
        raise UserError(f"{flag}={path}: {error.strerror}; `python -m {tool}` writes this file.") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{flag}={path}: not the results of {tool} ({error}); `python -m {tool}` writes them."
        ) from None
    return records


def listed(content: Any) -> list:
    """Returns the content of a file if it is a list; raises ValueError if not."""
    if not isinstance(content, list):
        raise ValueError(f"expected a list, not {type(content).__name__}")
    return content


def check_above_0(record: Any, names: Sequence[str]):
    """Raises ValueError for an attribute of a record that is not a number above 0; of other types says `mistyped`."""
    for name in names:
        if isinstance(value := getattr(record, name), int | float) and not value > 0:
            raise ValueError(f"{name} is not above 0")


def mistyped(record: Any) -> list[str]:
    """Returns the fields of a dataclass whose values do not have the declared types.

    Numbers are at least 0 and finite.
    """
    hints = typing.get_type_hints(type(record))
    return [name for name, hint in hints.items() if not _has_type(getattr(record, name), hint)]


def _has_type(value: object, hint: Any) -> bool:
    if dataclasses.is_dataclass(hint):
        return isinstance(value, typing.cast(type, hint)) and not mistyped(value)
    if isinstance(hint, types.UnionType):
        return any(_has_type(value, kind) for kind in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_has_type(item, typing.get_args(hint)[0]) for item in value)
    if typing.get_origin(hint) in (dict, collections.abc.Mapping):
        return isinstance(value, dict) and all(_has_type(item, typing.get_args(hint)[1]) for item in value.values())
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool) and 0 <= value < _MOST
    return isinstance(value, hint)
