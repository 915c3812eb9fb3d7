"""Registries of classes that a flag chooses by name: layers, routers. A user's own file adds to them.

A choice is written `NAME` or `NAME:field=value:field=value`, for instance `top_k:k=4`: the fields of the registered frozen
dataclass that are set, the others having their defaults.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from lingvo_moe.errors import UserError, did_you_mean

T = TypeVar("T")
_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_EXPECTED = {int: "a whole number", float: "a number", bool: "true or false"}


class ExtensionRegistry(Generic[T]):
    """Frozen dataclasses by name."""

    def __init__(self, noun: str):
        """`noun`: what is registered, for error messages ("router")."""
        self._noun = noun
        self._classes: dict[str, type] = {}

    def register(self, name: str) -> Callable[[type], type]:
        """Returns a class decorator that registers a frozen dataclass under `name`.

        Raises:
          ValueError: (from the decorator) the name is taken by a class of another module, or is not made of letters,
            digits and underscores.
        """

        def decorate(cls: type) -> type:
            if not name.replace("_", "").isalnum():
                raise ValueError(f"{self._noun} {name!r}: a name has letters, digits and underscores only.")
            other = self._classes.get(name, cls)
            if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
                raise ValueError(
                    f"{self._noun} {name!r} is registered twice, by {other.__module__}.{other.__qualname__} and by "
                    f"{cls.__module__}.{cls.__qualname__}; rename one of them."
                )
            self._classes[name] = cls
            return cls

        return decorate

    @property
    def names(self) -> tuple[str, ...]:
        """All registered names, sorted."""
        return tuple(sorted(self._classes))

    def class_of(self, choice: str) -> type:
        """The registered class of a choice.

        Raises:
          UserError: the name is unknown.
        """
        name = choice.partition(":")[0]
        if name not in self._classes:
            raise UserError(
                f"{self._noun} {name!r} is unknown.{did_you_mean(name, self.names)} Known: {', '.join(self.names)}; "
                f"--import=FILE.py loads one of your own."
            )
        return self._classes[name]

    def make(self, choice: str, defaults: Mapping[str, Any] | None = None) -> T:
        """Makes an instance of a choice.

        Args:
          choice: `NAME` or `NAME:field=value:...`.
          defaults: values for those fields of the class that have one of these names.

        Raises:
          UserError: an unknown name or field, a value that is not of the field's type, or one that the class refuses.
        """
        cls, (_, *settings) = self.class_of(choice), choice.split(":")
        fields = {field.name for field in dataclasses.fields(cls) if field.init}
        values = {name: value for name, value in (defaults or {}).items() if name in fields}
        kinds = typing.get_type_hints(cls) if settings else {}
        for setting in settings:
            name, _, text = setting.partition("=")
            if name not in fields:
                raise UserError(
                    f"{self._noun} {choice!r}: no field {name!r}.{did_you_mean(name, fields)} Fields: "
                    f"{', '.join(sorted(fields)) or 'none'}."
                )
            values[name] = self._parse(choice, setting, text, kinds[name])
        missing = [
            field.name
            for field in dataclasses.fields(cls)
            if field.name not in values
            and field.init
            and field.default is dataclasses.MISSING
            and field.default_factory is dataclasses.MISSING
        ]
        if missing:
            raise UserError(f"{self._noun} {choice!r} needs {missing[0]}: write {choice}:{missing[0]}=VALUE.")
        return cls(**values)

    def _parse(self, choice: str, setting: str, text: str, kind: Any) -> Any:
        if isinstance(kind, types.UnionType):
            if text.lower() == "none":
                return None
            kind = next(k for k in typing.get_args(kind) if k is not types.NoneType)
        try:
            return _BOOLEANS[text.lower()] if kind is bool else kind(text)
        except (KeyError, ValueError, TypeError):
            expected = _EXPECTED.get(kind, "a value that a flag cannot give")
            raise UserError(f"{self._noun} {choice!r}: {setting}: expected {expected}.") from None
