"""Output files of a command: paths are checked before the work, files are written completely or not at all."""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from lingvo_moe.errors import UserError
from lingvo_moe.utils import error_numbers


def check_path(flag: str, path: str | None, is_text: bool = True):
    """Raises UserError if no file can be written to `path`; call this before hours of work.

    Args:
      flag: the flag that holds the path, for the error.
      path: the value of the flag; None is accepted, and `-`, standard output, for text.
      is_text: whether `atomic_writer` writes the file; `atomic_path` has no standard output.
    """
    if path is None or (path == "-" and is_text):
        return
    if path == "-":
        raise UserError(f"{flag}=-: only text is written to standard output; expected the name of a file.")
    if not path:
        raise UserError(f"{flag}=: expected the name of a file.")
    if os.path.isdir(path):
        raise UserError(f"{flag}={path} is a directory; expected the name of a file.")
    # Replacing a device such as /dev/null by a file would break the machine.
    if os.path.exists(path) and not os.path.isfile(path):
        raise UserError(f"{flag}={path} is not a file but a device or a pipe; expected the name of a file.")
    if os.path.exists(path) and not os.access(path, os.W_OK):
        raise UserError(f"{flag}={path} is read-only; name another file, or make this one writable.")
    directory = os.path.dirname(path) or "."
    if not os.path.isdir(directory):
        raise UserError(f"{flag}={path}: there is no directory {directory}; create it first.")
    try:
        with _partial(os.path.realpath(path)) as partial:
            partial.touch()
    except OSError as error:
        raise UserError(f"{flag}={path} cannot be written to ({error.strerror}); name another file.") from None


def check_own_paths(paths: Mapping[str, str | None], taken: Mapping[str, str | None]):
    """Raises UserError unless each is None or a file that can be written to and that no other flag names.

    Args:
      paths: the value of each flag, by its name.
      taken: of the flags whose files these must not be.
    """
    owners = {_resolved(path): flag for flag, path in taken.items()} | {"-": "standard output"}
    for flag, path in paths.items():
        check_path(flag, path)
        if path is None:
            continue
        if owner := owners.get(_resolved(path)):
            raise UserError(f"{flag}={path}: expected the name of a file of its own, beside {owner}.")
        owners[_resolved(path)] = flag


def check_outside(paths: Mapping[str, str | None], flag: str, directory: str | pathlib.Path):
    """Raises UserError for a file inside of a directory that is read.

    Args:
      paths: the value of each flag, by its name.
      flag: that names the directory, for the error.
      directory: its value.
    """
    for name, path in paths.items():
        inside = pathlib.Path(os.path.realpath(directory))
        if path and path != "-" and pathlib.Path(os.path.realpath(path)).is_relative_to(inside):
            raise UserError(f"{name}={path} is inside of {flag}={directory}, which is read; name a file elsewhere.")


def as_json(value: Any) -> Any:
    """Returns a tree for `json.dump` whose numbers that are not finite, which JSON lacks, are strings such as `inf`."""
    if isinstance(value, dict):
        return {name: as_json(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(part) for part in value]
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def table_stream(path: str | None) -> TextIO:
    """Returns where a command prints a table beside the file `path`: standard error if that is standard output."""
    return sys.stderr if path == "-" else sys.stdout


@contextlib.contextmanager
def atomic_writer(path: str) -> Iterator[TextIO]:
    """Yields standard output for `-`, else a text file that replaces `path` when the context ends without an error."""
    if path == "-":
        yield sys.stdout
        return
    with atomic_path(path) as partial, open(partial, "w", encoding="utf-8") as file:
        yield file


@contextlib.contextmanager
def atomic_path(path: str | pathlib.Path, sync: bool = False) -> Iterator[pathlib.Path]:
    """Yields the path of a file to write, which replaces `path` when the context ends without an error.

    Of a symbolic link it replaces the target. It has the permissions of the file that it replaces, or of any new file;
    a library may write it with its own (safetensors: for its owner alone). An
    OSError of a write, such as that of a full disk, names `path`.

    Args:
      path: of the file.
      sync: whether the file is on disk before it replaces `path`, so that a loss of power leaves one of the two.
    """
    target = os.path.realpath(path)
    with _partial(target) as partial, named_errors(path):
        partial.touch()
        mode = os.stat(target if os.path.exists(target) else partial).st_mode
        yield partial
        partial.chmod(mode)
        if sync:
            with open(partial, "rb") as file:
                os.fsync(file.fileno())
        os.replace(partial, target)


@contextlib.contextmanager
def named_errors(path: str | pathlib.Path) -> Iterator[None]:
    """Adds the name of a file to an error of writing it; the system names only a file that cannot be opened."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in error_numbers.OF_WRITES:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def _partial(path: str | pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the name of a file beside `path`, of this process alone, and deletes the file at the end."""
    partial = pathlib.Path(f"{path}.partial-{os.getpid()}")
    try:
        yield partial
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _resolved(path: str | None) -> str | None:
    """Returns one name for all names of a file."""
    return os.path.realpath(path) if path and path != "-" else path
