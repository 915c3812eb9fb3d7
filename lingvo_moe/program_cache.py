"""The program cache: lowered programs on disk, so that a second start takes seconds.

It is off until `use` is called; the command line calls it. The key of a program is the method that lowers it, the
object that it is lowered from with all its hyperparameters, and a digest of this package's source and of the versions
of the libraries. The PJRT engine caches the executables that XLA compiles in the same directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import os
import pathlib
import re
import tempfile
from collections.abc import Callable

from lingvo_moe.errors import UserError
from lingvo_moe.program import Program
from lingvo_moe.utils import processor, user_cache
from lingvo_moe.utils.hashes import sha256

OFF = "off"
# The maximal number of files of each kind; the oldest are deleted. A program of a large model takes some megabytes.
_MAX_FILES = 200
_VERSIONS = ("tensorflow", "tensorflow-tpu", "jax")
_SOURCE = pathlib.Path(__file__).parent
# The files that are made below the cache directory, here and by JAX (for a GPU also what its compiler has timed); no
# others are deleted. `tmp...` are the directories of killed processes.
_OWN_FILES = {
    "programs": re.compile(r"programs/(?:[0-9a-f]{64}|tmp\w+/program)"),
    "executables": re.compile(
        r"executables/[0-9a-f]{16}/(?:\S+-[0-9a-f]{64}-(?:cache|atime)|xla_gpu_per_fusion_autotune_cache_dir/\S+)"
    ),
}


@dataclasses.dataclass
class _Settings:
    """The cache of this process; None while it is off."""

    directory: pathlib.Path | None = None


_settings = _Settings()


def default() -> str:
    """Returns `$LINGVO_MOE_CACHE`, or `user_cache.directory()`."""
    return os.environ.get("LINGVO_MOE_CACHE") or str(user_cache.directory())


def use(directory: str):
    """Caches programs below `directory` from now on; `off` turns the cache off.

    The directory is created with access for this user alone.

    Raises:
      UserError: the directory cannot be written to.
    """
    _settings.directory = None
    if directory == OFF:
        return
    try:
        for part, own_file in _OWN_FILES.items():
            os.makedirs(os.path.join(directory, part), mode=0o700, exist_ok=True)
            _delete_oldest(pathlib.Path(directory), part, own_file)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UserError(
            f"--cache={directory}: cannot be written to ({error.strerror}). Name another directory, or pass "
            f"--cache={OFF}."
        ) from None
    _settings.directory = pathlib.Path(directory)


def executables() -> pathlib.Path | None:
    """Returns the directory for what an engine compiles; None while the cache is off."""
    return _settings.directory and _settings.directory / "executables"


def cached(method: Callable[..., Program]) -> Callable[..., Program]:
    """Decorates a method that lowers a program, of a dataclass whose repr contains all that the program depends on."""

    @functools.wraps(method)
    def lower(self, *arguments) -> Program:
        if _settings.directory is None or not _is_covered(self):
            return method(self, *arguments)
        # The processor decides the form of products (`ops.products`), and several may share a directory.
        form = f"multiplies_bfloat16={processor.multiplies_bfloat16()}"
        text = f"{method.__name__} of {self} for {arguments} by {_fingerprint()}, {form}"
        path = _settings.directory / "programs" / sha256(text)
        with contextlib.suppress(UserError, OSError):  # absent, or corrupt and then replaced
            os.utime(path)
            return Program.load(str(path))
        program = method(self, *arguments)
        _write(program, path)
        return program

    return lower


def _is_covered(value: object) -> bool:
    """Whether the digest of this package covers the code of a value and of its fields; it does not cover user code."""
    if isinstance(value, tuple):
        return all(map(_is_covered, value))
    if dataclasses.is_dataclass(value):
        named = getattr(value, "registered_classes", ())  # layers and routers that a model's fields name
        classes = (type(value), *named)
        return all(cls.__module__.startswith("lingvo_moe.") for cls in classes) and all(
            _is_covered(getattr(value, field.name)) for field in dataclasses.fields(value)
        )
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
    """Writes a program to the cache. A full disk is not an error: the program is used without."""
    with contextlib.suppress(OSError), tempfile.TemporaryDirectory(dir=path.parent) as directory:
        # Another process may write the same program now, hence the temporary directory.
        program.save(f"{directory}/program")
        os.replace(f"{directory}/program", path)


def _delete_oldest(cache: pathlib.Path, part: str, own_file: re.Pattern):
    with contextlib.suppress(FileNotFoundError):  # another process may delete them at the same time
        found = (path for path in (cache / part).rglob("*") if own_file.fullmatch(path.relative_to(cache).as_posix()))
        files = sorted((path for path in found if path.is_file()), key=lambda path: path.stat().st_mtime)
        for old in files[:-_MAX_FILES]:
            old.unlink()
