"""`--set field=value`: reads and changes the fields of nested frozen dataclasses, by type."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from lingvo_moe import definitions
from lingvo_moe.errors import UserError, did_you_mean
from lingvo_moe.sharding.layout import DeviceMesh
from lingvo_moe.utils import field_values


def fields(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (path, value) of every plain field: `("model.num_experts", 8)`."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, DeviceMesh):
            yield from fields(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, value


def assigned(assignments: Sequence[str], name: str) -> str | None:
    """Returns the text that the last assignment to a field gives it, None if there is none.

    Args:
      assignments: as those of `apply`.
      name: of a field of the configuration itself, not of one inside of it.
    """
    pairs = [assignment.partition("=") for assignment in assignments]
    return next((text.strip() for field, equals, text in reversed(pairs) if equals and field.strip() == name), None)


def text(value: Any) -> str:
    """Returns the text of a value, or of its like in JSON, from which `apply` reads it."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(text, value)) if isinstance(value, tuple | list) else str(value)


def apply(config: Any, assignments: Sequence[str]) -> Any:
    """Returns `config` with the assignments applied at once, so that fields that must agree can change together.

    Args:
      config: nested frozen dataclasses.
      assignments: texts `field=value`; a field is named by its path (`model.num_experts`) or by an unambiguous end of
        it (`num_experts`).

    Raises:
      UserError: this is no list of texts, an unknown or ambiguous field, a value of another type, or one that the class
        rejects.
    """
    definitions.check_texts("assignments", assignments)
    changes: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals:
            raise UserError(f"--set {assignment}: write field=value, for instance model.num_experts=8.")
        path = _find(config, name.strip())
        text, kind = text.strip(), _type_of(config, path)
        changes[path] = field_values.parse(f"--set {path}={text}", text, kind, _parse_other)
    return _replace(config, changes)


def _find(config: Any, name: str) -> str:
    known = [path for path, _ in fields(config)]
    if name in known:
        return name
    matches = [path for path in known if path.endswith(f".{name}")]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise UserError(f"--set {name} is ambiguous: {', '.join(matches)}; write the full path.")
    ends = {path.rpartition(".")[2]: path for path in known}
    raise UserError(f"--set {name}: no such field.{did_you_mean(name, [*known, *ends])} `show NAME` lists all fields.")


def _type_of(config: Any, path: str) -> Any:
    *parents, name = path.split(".")
    for parent in parents:
        config = getattr(config, parent)
    return typing.get_type_hints(type(config))[name]


def _parse_other(where: str, text: str, kind: Any) -> Any:
    """Reads a tuple, or a DeviceMesh."""
    if kind is DeviceMesh:
        return DeviceMesh.parse(text)
    if typing.get_origin(kind) is not tuple:
        field_values.no_other_kind(where, text, kind)
    parts = (part.strip() for part in text.strip("()").split(","))
    return tuple(field_values.parse(where, part, typing.get_args(kind)[0], _parse_other) for part in parts if part)


def _replace(config: Any, changes: dict[str, Any]) -> Any:
    values = {path: value for path, value in changes.items() if "." not in path}
    nested: dict[str, dict[str, Any]] = {}
    for path, value in changes.items():
        if "." in path:
            parent, _, rest = path.partition(".")
            nested.setdefault(parent, {})[rest] = value
    for parent, below in nested.items():
        values[parent] = _replace(getattr(config, parent), below)
    return dataclasses.replace(config, **values)
