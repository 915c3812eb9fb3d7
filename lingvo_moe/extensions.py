"""Extension points: registries of named implementations, and the import of a user's file that adds to them.

A file outside this repository registers a model, a layer, a router, a layout or a data source under a name.
`--import=FILE` imports it, and then a flag or `--set field=NAME` selects what it registers; see docs/extending.md.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import pathlib
import re
import sys
import traceback
import types
import typing
from collections.abc import Callable, Collection, Iterator
from typing import Any, Generic, TypeVar

from lingvo_moe import definitions
from lingvo_moe.errors import UserError, did_you_mean

Entry = TypeVar("Entry")
Defined = TypeVar("Defined")
_DIRECTORY = "this is a directory; name a file in it."
_NAME = re.compile(r"\w[\w.-]*")


class Registry(Generic[Entry]):
    """The implementations of one extension point, by name.

    Attributes:
      kind: what error messages call an entry, for instance `layout`.
    """

    def __init__(
        self, kind: str, reserved: Collection[str] = (), check: Callable[[str, Any], None] = lambda what, entry: None
    ):
        """Makes an empty registry.

        Args:
          kind: what error messages call an entry.
          reserved: names with a meaning of their own, such as `auto`.
          check: raises UserError for an entry that is malformed; called with what messages call it, and the entry.
        """
        self.kind = kind
        self._check = check
        self._reserved = tuple(reserved)
        self._entries: dict[str, Entry] = {}

    def register(self, name: str, entry: Entry) -> Entry:
        """Adds `entry` under `name` and returns it.

        A file may be imported twice: an equal entry, or the class or function of the same name and module, replaces the
        previous one.

        Raises:
          UserError: `name` is malformed, reserved, or belongs to another entry; or the entry is malformed.
        """
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UserError(f"{self.kind} name {name!r}: use letters, digits, _, - and '.'.")
        if name in self._reserved:
            raise UserError(f"{self.kind} name {name!r} is reserved; choose another name.")
        if name in self._entries and not _is_same(self._entries[name], entry):
            raise UserError(f"{self.kind} {name!r} is already registered; choose another name.")
        with definitions.named(lambda: f"{self.kind} {name!r}", entry):
            self._check(f"{self.kind} {name!r}", entry)
        self._entries[name] = entry
        return entry

    def decorator(self, written: str, name: object) -> Callable[[Defined], Defined]:
        """Returns the decorator that registers a class or function under `name`.

        Args:
          written: how users write it, such as `register_router`.
          name: what they passed to it.

        Raises:
          UserError: `name` is what the decorator stands above; as `register`, from the decorator.
        """
        if isinstance(name, (type, types.FunctionType)):
            above = f"{'class' if isinstance(name, type) else 'def'} {name.__name__}"
            raise UserError(f'@{written} needs a name: write @{written}("mine") above {above}.')
        return lambda defined: typing.cast(Any, self).register(name, defined)

    def get(self, name: str) -> Entry:
        """Returns the entry of `name`; raises UserError, with the nearest names, where there is none."""
        if name not in self._entries:
            known = [*self._reserved, *self._entries]
            raise UserError(
                f"{self.kind} {name!r} is unknown.{did_you_mean(name, known)} Known: {', '.join(known)}. "
                f"--import=FILE adds those that FILE registers."
            )
        return self._entries[name]

    def label(self, defined: Any) -> str:
        """What messages call a class or function: `layer 'mine'`, or by its own name where it is not registered."""
        names = (name for name, entry in self._entries.items() if _is_same(entry, defined))
        return f"{self.kind} {next(names, defined.__name__)!r}"

    def names(self) -> tuple[str, ...]:
        """All registered names, in the order of registration."""
        return tuple(self._entries)

    @contextlib.contextmanager
    def isolated(self) -> Iterator[None]:
        """Removes on exit what was registered inside the block; for tests."""
        entries = dict(self._entries)
        try:
            yield
        finally:
            self._entries = entries


def import_module(where: str):
    """Imports a user's module, which registers what it defines.

    Args:
      where: a module's dotted name, or a path to a .py file.

    Raises:
      UserError: there is no such module or file, its name is that of another module, or importing it fails.
    """
    try:
        if where.endswith(".py"):
            _import_file(pathlib.Path(where))
        elif os.sep in where:
            raise UserError(_DIRECTORY if os.path.isdir(where) else f"write {where}.py.")
        else:
            module = importlib.import_module(where)
            if hasattr(module, "__path__") and module.__file__ is None:  # a directory without __init__.py
                raise UserError(_DIRECTORY)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise UserError(f"--import={where}: {_reason(where, error)}") from error


def _reason(where: str, error: BaseException) -> str:
    """Describes what an import raised, and the line of the user's file that it came from."""
    if isinstance(error, ModuleNotFoundError) and error.name and f"{where}.".startswith(f"{error.name}."):
        return f"{error}. Give a module on the Python path, or a path ending in .py."
    ours = (__file__, importlib.__file__)
    files = (frame.filename for frame in traceback.extract_tb(error.__traceback__))
    file = next((file for file in files if file not in ours and not file.startswith("<frozen importlib")), None)
    text = str(error) if isinstance(error, UserError) else f"{type(error).__name__} while importing it: {error}"
    # A syntax error names the line itself, and so does the message about a registered class.
    if file is None or isinstance(error, SyntaxError) or file in text:
        return text
    return f"{text.rstrip('.')}{definitions.raised_at(error, file)}."


def _import_file(path: pathlib.Path):
    if not path.is_file():
        raise UserError(_DIRECTORY if path.is_dir() else "no such file.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UserError("no Python source file.")
    if other := _other_module(path):
        raise UserError(f"{path.stem} is the name of {other}, which the file would replace; give it another name.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(path.stem, None)
        raise


def _other_module(path: pathlib.Path) -> str | None:
    """Describes the module of another file that has the name of this one, imported or not; None if there is none."""
    if path.stem in sys.stdlib_module_names:
        return "a module of Python's standard library"
    if path.stem == "__main__":
        return "the running program"
    try:
        spec = importlib.util.find_spec(path.stem)
    except (ModuleNotFoundError, ValueError):  # nothing has the first part of its dotted name, or no file is known
        return None
    # A directory of this name, which has no location, is no module unless a program uses it as one.
    if spec is None or spec.origin is None or not spec.has_location:
        return None
    return None if pathlib.Path(spec.origin).resolve() == path.resolve() else f"the module {spec.origin}"


def _is_same(old: Any, new: Any) -> bool:
    if isinstance(old, (type, types.FunctionType)):
        return _identity(old) == _identity(new)
    return old == new


def _identity(entry: Any) -> tuple[str, str]:
    """The module and the qualified name of a class or function, or of an object's class."""
    defined = entry if isinstance(entry, (type, types.FunctionType)) else type(entry)
    return defined.__module__, defined.__qualname__
