"""Instances of registered frozen dataclasses, from the text of a flag: layers and routers.

A choice is written `NAME` or `NAME:field=value:field=value`, for instance `top_k:k=4`. The fields that it does not name
have their defaults.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from lingvo_moe import definitions
from lingvo_moe.errors import UserError, did_you_mean
from lingvo_moe.extensions import Registry
from lingvo_moe.utils import field_values

Entry = TypeVar("Entry")


def make(registry: Registry[type[Entry]], choice: str, defaults: Mapping[str, Any] | None = None) -> Entry:
    """Makes an instance of a choice.

    Args:
      registry: of frozen dataclasses.
      choice: `NAME` or `NAME:field=value:...`.
      defaults: values for those fields of the class that have one of these names.

    Raises:
      UserError: no text, an unknown name or field, a field without a value, a value that is not of the field's type, or
        one that the class refuses.
    """
    if not isinstance(choice, str):
        raise UserError(f"{registry.kind} {choice!r}: expected the text NAME or NAME:field=value.")
    name, *settings = choice.split(":")
    cls = registry.get(name)
    fields = {field.name: field for field in dataclasses.fields(typing.cast(Any, cls)) if field.init}
    values = {name: value for name, value in (defaults or {}).items() if name in fields}
    hints = typing.get_type_hints(cls) if settings else {}
    for setting in settings:
        name, _, text = setting.partition("=")
        if name not in fields:
            raise UserError(
                f"{registry.kind} {choice!r}: there is no field {name!r}.{did_you_mean(name, fields)} Fields: "
                f"{', '.join(fields) or 'none'}."
            )
        values[name] = field_values.parse(f"{registry.kind} {choice!r}: {setting}", text, hints[name])
    for name in fields:
        if name not in values and fields[name].default is fields[name].default_factory is dataclasses.MISSING:
            raise UserError(f"{registry.kind} {choice!r}: field {name} has no value; write {choice}:{name}=VALUE.")
    return cls(**values)


def check_metrics(registry: Registry, instance: Any, returned: Mapping[str, Any]):
    """Raises UserError unless a call of a registered class's instance returned the metrics of its `metric_names`.

    Args:
      registry: of the class.
      instance: an object of it.
      returned: the metrics by name, which are scalar float32 tensors.
    """
    declared, label = instance.metric_names, registry.label(type(instance))
    definitions.check_scalars(label, returned, "float32")
    if set(returned) != set(declared):
        raise UserError(
            f"{label}: metric_names declares {_listed(declared)}, but a call returned {_listed(returned)}. Give both "
            f"the same names."
        )


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "no metric"
