"""Registered models: classes by name; any unambiguous part of the name selects one.

    @registry.register
    class Quickstart(Recipe): ...          # in params/m4.py: "m4.Quickstart"

The models of this repository are the modules of the package `params`. A user's module, imported with `--import`,
registers models under `module.ClassName` in the same way (see `extensions`).
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from typing import Protocol, TypeVar

from lingvo_moe import definitions
from lingvo_moe.errors import UserError, did_you_mean
from lingvo_moe.extensions import Registry

Class = TypeVar("Class", bound=type)
_ZOO = "params"


class RegisteredModel(Protocol):
    """What a registered class has; `experiment.Recipe` is a base class for it."""

    def experiment(self):
        """Returns the `Experiment`."""
        ...


def _check(what: str, cls: type):
    """Raises UserError for a class that does not define `experiment`, or that needs arguments."""
    definitions.check(what, cls, RegisteredModel)
    definitions.check_call(what, cls)


MODELS: Registry[type] = Registry("model", check=_check)


def register(cls: Class | None = None) -> Class:
    """Class decorator: registers `cls` as `module.ClassName`, where `module` is the last part of the module's name.

    Raises:
      UserError: another class has that name, or this is no class with a method `experiment` that takes no arguments.
    """
    if not isinstance(cls, type):
        raise UserError(
            "@registry.register expects a class: write @registry.register without () above a subclass of Recipe, whose "
            "name is that of the model."
        )
    MODELS.register(f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}", cls)
    return cls


def names() -> list[str]:
    """Returns all registered names, sorted."""
    _import_zoo()
    return sorted(MODELS.names())


def get(name: str) -> type:
    """Returns the class of a name or of an unambiguous part of one; the case and punctuation of a part do not matter.

    `m4.MoE2048E36L`, `2048E36L` and `MoE(2048E, 36L)` select the same model.

    Raises:
      UserError: no model matches, or several do.
    """
    return MODELS.get(full_name(name))


def full_name(name: str) -> str:
    """Returns the registered name that `name` selects; see `get`."""
    known = names()
    if name in known:
        return name
    part = _plain(name)
    matches = [k for k in known if part and part in _plain(k)]
    exact = [k for k in matches if _plain(k) == part or _plain(k.partition(".")[2]) == part]
    if len(exact or matches) == 1:
        return (exact or matches)[0]
    if matches:
        raise UserError(f"--model={name} is ambiguous: {', '.join(matches)}; write more of the name.")
    hint = did_you_mean(name, known) or did_you_mean(name, {k.partition(".")[2]: k for k in known})
    raise UserError(f"--model={name}: no such model.{hint} `python -m lingvo_moe list` shows all of them.")


def _import_zoo():
    zoo = importlib.import_module(_ZOO)
    for module in pkgutil.iter_modules(zoo.__path__):
        if not module.name.endswith("_test"):
            importlib.import_module(f"{_ZOO}.{module.name}")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
