"""How a configuration of a command becomes flags, and parsed flags a configuration.

A configuration is a frozen dataclass whose fields are the command's flags: `define_flags` defines them, `read` turns
parsed flags into the dataclass. Commands take configurations and never see absl.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from absl import flags

from lingvo_moe import overrides
from lingvo_moe.errors import UserError

Config = TypeVar("Config", bound="CommandConfig")


class _Flag(NamedTuple):
    """How a field becomes a flag.

    Attributes:
      define: the function of absl that defines it.
      options: arguments of that function, `help` among them.
      name: the flag's name where the field cannot have it; otherwise None.
      sets: the path of the hyperparameter that the flag sets; None for another flag.
    """

    define: Callable[..., Any]
    options: dict[str, Any]
    name: str | None
    sets: str | None


def flag(
    define: Callable[..., Any], default: Any, help: str, name: str | None = None, sets: str | None = None, **options
) -> Any:
    """Declares a field that is a flag; a function as `default` is called whenever the flag is defined."""
    metadata = {"flag": _Flag(define, {"help": help, **options}, name, sets)}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommandConfig:
    """The flags of all commands.

    Attributes:
      given: the names of the flags that were passed.
    """

    imports: tuple[str, ...] = flag(
        flags.DEFINE_multi_string,
        (),
        "a module or .py file to import first, which may register models and more",
        "import",
    )
    given: frozenset[str] = frozenset()


def define_flags(config: type[CommandConfig], values: flags.FlagValues):
    """Defines the flags of a configuration."""
    for field, declared in _flags(config):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        default = list(default) if isinstance(default, tuple) else default
        declared.define(declared.name or field.name, default, flag_values=values, **declared.options)


def read(config: type[Config], values: flags.FlagValues) -> Config:
    """Returns the configuration that parsed flags stand for.

    Raises:
      UserError: a flag and `--set` give the same hyperparameter.
    """
    parsed: dict[str, Any] = {
        field.name: values[declared.name or field.name].value for field, declared in _flags(config)
    }
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in parsed.items()}
    for field, declared in _flags(config):
        if declared.sets is not None and fields[field.name] is not None:
            _check_once(f"--{declared.name or field.name}={fields[field.name]}", declared.sets, fields["assignments"])
    return config(given=frozenset(name for name in values if values[name].present), **fields)


def _check_once(given: str, path: str, assignments: tuple[str, ...]):
    """Raises UserError if `--set` has the hyperparameter of a flag too, by its path or an end of it."""
    parts = path.split(".")
    for name in (".".join(parts[start:]) for start in range(len(parts))):
        if (value := overrides.assigned(assignments, name)) is not None:
            raise UserError(f"{given} and --set {name}={value} are mutually exclusive; pass one of them.")


def _flags(config: type[CommandConfig]) -> Iterator[tuple[dataclasses.Field, _Flag]]:
    for field in dataclasses.fields(config):
        if "flag" in field.metadata:
            yield field, field.metadata["flag"]
