"""Registered models: classes by name, found by any unambiguous part of it.

    @registry.register
    class Quickstart(Recipe): ...          # in params/m4.py: "m4.Quickstart"

The zoo's own models are the modules of the package `params`. Models of one's own live anywhere: `--import=my_models` (a
module on the Python path, or a path to a .py file) registers them under `my_models.ClassName`.
"""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
import pkgutil
import re
import sys
from typing import TypeVar

from lingvo_moe.errors import UserError, did_you_mean

Class = TypeVar("Class", bound=type)
_ZOO = "params"
_classes: dict[str, type] = {}


def register(cls: Class) -> Class:
    """Class decorator: registers `cls` as `module.ClassName`, the module's last part only.

    Raises:
      ValueError: another class has that name.
    """
    name = f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}"
    if name in _classes and _classes[name].__module__ != cls.__module__:
        raise ValueError(
            f"model {name} is registered twice, in {_classes[name].__module__} and in {cls.__module__}; rename "
            f"one of them."
        )
    _classes[name] = cls
    return cls


def names() -> list[str]:
    """All registered names, sorted."""
    _import_zoo()
    return sorted(_classes)


def get(name: str) -> type:
    """Returns the class of an exact name or of an unambiguous part of one; case and punctuation of a part do not matter.

    `m4.MoE2048E36L`, `2048E36L` and `MoE(2048E, 36L)` are the same model.

    Raises:
      UserError: no model, or several, fit.
    """
    return _classes[full_name(name)]


def full_name(name: str) -> str:
    """Returns the registered name that `name` stands for; see `get`."""
    known = names()
    if name in known:
        return name
    part = _plain(name)
    found = [k for k in known if part and part in _plain(k)]
    exact = [k for k in found if _plain(k) == part or _plain(k.partition(".")[2]) == part]
    if len(exact or found) == 1:
        return (exact or found)[0]
    if found:
        raise UserError(f"--model={name} could be {', '.join(found)}; write more of the name.")
    hint = did_you_mean(name, known) or did_you_mean(name, {k.partition(".")[2]: k for k in known})
    raise UserError(f"--model={name}: no such model.{hint} `python -m lingvo_moe list` shows all of them.")


def import_module(where: str):
    """Imports models from outside the tree: a module's dotted name, or a path to a .py file.

    Raises:
      UserError: there is no such module or file, or it fails while being imported.
    """
    try:
        if where.endswith(".py"):
            _import_file(pathlib.Path(where))
        else:
            importlib.import_module(where)
    except UserError:
        raise
    except ModuleNotFoundError as error:
        raise UserError(
            f"--import={where}: {error}. Give a module on the Python path, or a path ending in .py."
        ) from error
    except (Exception, SystemExit) as error:  # the user's own code may raise anything
        raise UserError(f"--import={where}: {type(error).__name__} while importing it: {error}") from error


def _import_file(path: pathlib.Path):
    if not path.is_file():
        raise UserError(f"--import={path}: no such file.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)


def _import_zoo():
    zoo = importlib.import_module(_ZOO)
    for module in pkgutil.iter_modules(zoo.__path__):
        if not module.name.endswith("_test"):
            importlib.import_module(f"{_ZOO}.{module.name}")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
