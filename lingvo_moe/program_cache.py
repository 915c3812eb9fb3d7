"""The cache: programs that were lowered before, kept on disk, so that a second start takes seconds.

Off until `use` is called, as the command line does. A program is found by the method that lowers it, the object it is lowered
from with all its hyperparameters, and a digest of this package's source and of the versions it runs on. The PJRT engine keeps
the executables that XLA makes of programs in the same directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import os
import pathlib
import tempfile
from collections.abc import Callable

from lingvo_moe.errors import UserError
from lingvo_moe.program import Program

OFF = "off"
# Of each kind; the oldest go. A program of a giant takes some megabytes.
_KEPT = 200
_VERSIONS = ("tensorflow", "tensorflow-tpu", "jax")
_SOURCE = pathlib.Path(__file__).parent

_directory: pathlib.Path | None = None


def default() -> str:
    """`$LINGVO_MOE_CACHE`, or this user's directory by the XDG base directory specification."""
    return os.environ.get("LINGVO_MOE_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache"), "lingvo_moe"
    )


def use(directory: str):
    """Keeps programs below `directory` from now on, which is created for this user alone; `off` keeps none.

    Raises:
      UserError: a place that cannot be written to.
    """
    global _directory
    _directory = None
    if directory == OFF:
        return
    try:
        for part in ("programs", "executables"):
            os.makedirs(os.path.join(directory, part), mode=0o700, exist_ok=True)
            _forget_oldest(pathlib.Path(directory, part))
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UserError(
            f"--cache={directory}: cannot be written to ({error.strerror}). Name another directory, or pass "
            f"--cache={OFF}."
        ) from None
    _directory = pathlib.Path(directory)


def executables() -> pathlib.Path | None:
    """Where an engine keeps what it compiles; None while no cache is in use."""
    return _directory and _directory / "executables"


def kept(method: Callable[..., Program]) -> Callable[..., Program]:
    """Decorates a method that lowers a program, of a dataclass whose text says all that the program depends on."""

    @functools.wraps(method)
    def lower(self, *arguments) -> Program:
        if _directory is None or not _is_ours(self):
            return method(self, *arguments)
        text = f"{method.__name__} of {self} for {arguments} by {_fingerprint()}"
        path = _directory / "programs" / hashlib.sha256(text.encode()).hexdigest()
        with contextlib.suppress(UserError, OSError):  # not there, or damaged and written anew
            os.utime(path)
            return Program.load(str(path))
        program = method(self, *arguments)
        _write(program, path)
        return program

    return lower


def _is_ours(value: object) -> bool:
    """Whether the digest of this package covers a value, down to its last field; of other people's it knows no source."""
    if isinstance(value, tuple):
        return all(map(_is_ours, value))
    if dataclasses.is_dataclass(value):
        own = type(value).__module__.startswith("lingvo_moe.")
        named = getattr(value, "registered_classes", ())  # layers and routers that a model's fields name
        own = own and all(cls.__module__.startswith("lingvo_moe.") for cls in named)
        return own and all(_is_ours(getattr(value, field.name)) for field in dataclasses.fields(value))
    return type(value).__module__ == "builtins"


@functools.cache
def _fingerprint() -> str:
    digest = hashlib.sha256()
    for path in sorted(path for path in _SOURCE.rglob("*.py") if not path.name.endswith("_test.py")):
        digest.update(f"{path.relative_to(_SOURCE)}\0".encode() + path.read_bytes() + b"\0")
    for package in _VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            digest.update(f"{package}=={importlib.metadata.version(package)}\0".encode())
    return digest.hexdigest()


def _write(program: Program, path: pathlib.Path):
    """Keeps a program. A full disk is no reason to stop: it is but a cache."""
    with contextlib.suppress(OSError), tempfile.TemporaryDirectory(dir=path.parent) as own:
        # In a directory of its own: another process may write the same program now.
        program.save(f"{own}/program")
        os.replace(f"{own}/program", path)


def _forget_oldest(directory: pathlib.Path):
    """Another process may do the same at this moment."""
    with contextlib.suppress(FileNotFoundError):
        files = sorted((path for path in directory.rglob("*") if path.is_file()), key=lambda path: path.stat().st_mtime)
        for old in files[:-_KEPT]:
            old.unlink()
