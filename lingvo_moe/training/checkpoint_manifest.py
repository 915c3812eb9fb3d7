"""Integrity: a manifest beside the files of a checkpoint says what each must be, to the bit.

`STEP/manifest.json` is written once the checkpoint is complete. It holds the size and SHA-256 of every other file, the number
of arrays, and the SHA-256 of itself.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TypeVar

from lingvo_moe.errors import UserError
from lingvo_moe.utils import progress

Result = TypeVar("Result")
MANIFEST = "manifest.json"
_PARTIAL = MANIFEST + ".partial"
_VERSION = 1
# Hashing is bound by the disk beyond this.
_THREADS = min(8, os.cpu_count() or 1)
# Bytes; with fewer, work is over before it could show progress.
LONG = 2**30


class CorruptCheckpoint(UserError):
    """A checkpoint is not what was saved; the message says where it differs."""


@dataclasses.dataclass(frozen=True)
class File:
    """What a file must be: its size in bytes, and the SHA-256 of them in hexadecimal."""

    size: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a step's directory must hold.

    Attributes:
      step: of the checkpoint.
      arrays: how many there are.
      files: by path relative to the directory, with `/`.
    """

    step: int
    arrays: int
    files: dict[str, File]


def write_manifest(directory: pathlib.Path, arrays: int) -> Manifest:
    """Writes the manifest of a complete checkpoint that holds `arrays` arrays; replaces one that is there."""
    paths = _files(directory)
    hashes = _in_threads(lambda path: _sha256(directory / path), paths)
    files = {path: File((directory / path).stat().st_size, sha256) for path, sha256 in zip(paths, hashes)}
    manifest = Manifest(int(directory.name), arrays, files)
    content = dataclasses.asdict(manifest) | {"version": _VERSION}
    partial = directory / _PARTIAL
    try:
        with open(partial, "w", encoding="utf-8") as file:
            json.dump(content | {"sha256": _digest(content)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, directory / MANIFEST)
    finally:
        partial.unlink(missing_ok=True)
    return manifest


def load(directory: pathlib.Path) -> Manifest | None:
    """Returns the manifest, None where there is none; raises Damaged where it is not as it was written."""
    try:
        content = json.loads((directory / MANIFEST).read_bytes())
        changed = content.pop("sha256") != _digest(content)
        version = content.pop("version")
        files = {path: File(**file) for path, file in content.pop("files").items()}
        manifest = Manifest(files=files, **content)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CorruptCheckpoint(f"{MANIFEST} cannot be read ({error.strerror})") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise CorruptCheckpoint(f"{MANIFEST} is not as it was written") from None
    if changed or not all(map(_is_inside, files)):
        raise CorruptCheckpoint(f"{MANIFEST} is not as it was written")
    if version != _VERSION:
        raise CorruptCheckpoint(f"{MANIFEST} has version {version}, this program knows {_VERSION}")
    if manifest.step != int(directory.name):
        raise CorruptCheckpoint(f"{MANIFEST} is that of step {manifest.step}")
    return manifest


def problems(directory: pathlib.Path, items: Collection[str] | None = None, hashes: bool = True) -> list[str] | None:
    """Compares a checkpoint with its manifest.

    Sizes come first: where one differs nothing is hashed. Files that the manifest does not know do no harm.

    Args:
      directory: of a step.
      items: the subdirectories that matter, and with them the files beside them; None for all.
      hashes: whether to read the files; sizes alone cost next to nothing.

    Returns:
      What is wrong, by file; nothing for a sound checkpoint. None where there is no manifest to compare with.
    """
    try:
        manifest = load(directory)
    except CorruptCheckpoint as error:
        return [str(error)]
    if manifest is None:
        return None
    files = {
        path: file
        for path, file in manifest.files.items()
        if items is None or "/" not in path or path.partition("/")[0] in items
    }
    found = [_size_problem(directory / path, path, file.size) for path, file in files.items()]
    if hashes and not any(found):
        checks = _in_threads(lambda path: _hash_problem(directory / path, path, files[path].sha256), files)
        if sum(file.size for file in files.values()) >= LONG:
            checks = progress.track(checks, f"checking checkpoint {directory.name}", len(files), "files")
        found = list(checks)
    return [problem for problem in found if problem]


def size(directory: pathlib.Path) -> int:
    """Bytes of all files of a checkpoint, without the manifest."""
    return sum((directory / path).stat().st_size for path in _files(directory))


def _is_inside(path: str) -> bool:
    return not path.startswith("/") and ".." not in path.split("/")


def _files(directory: pathlib.Path) -> list[str]:
    """Paths of all files, sorted, but for the manifest's own."""
    paths = (path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    return sorted(path for path in paths if path not in (MANIFEST, _PARTIAL))


def _in_threads(function: Callable[[str], Result], paths: Iterable[str]) -> Iterator[Result]:
    """Yields the results in order. Threads do help: hashlib lets go of Python's lock."""
    with concurrent.futures.ThreadPoolExecutor(_THREADS, "hash") as pool:
        yield from pool.map(function, paths)


def _size_problem(file: pathlib.Path, path: str, expected: int) -> str | None:
    try:
        actual = file.stat().st_size
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    return f"{path} has {actual} bytes instead of {expected}" if actual != expected else None


def _hash_problem(file: pathlib.Path, path: str, expected: str) -> str | None:
    try:
        return f"{path} has changed" if _sha256(file) != expected else None
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"


def _sha256(file: pathlib.Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _digest(content: dict) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode("utf-8")).hexdigest()
