"""The manifest of a checkpoint: what files it consists of, to notice one that changed, was cut short or is missing.

`STEP/manifest.json` is written once the checkpoint is complete. It holds the size of every other file, the SHA-256 of
every small one, the number of arrays, and the SHA-256 of itself. Large files are the data files of OCDBT, whose content
TensorStore verifies by CRC-32C when it reads (see `checkpoint_arrays`), so neither writing nor checking a manifest
reads the weights.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TypeVar

from lingvo_moe.errors import UserError
from lingvo_moe.training.checkpoint_errors import CorruptCheckpoint, check_read_failure
from lingvo_moe.utils import progress, safe_paths
from lingvo_moe.utils.hashes import file_sha256, sha256

Result = TypeVar("Result")
MANIFEST = "manifest.json"
_PARTIAL = MANIFEST + ".partial"
# Version 1 has the SHA-256 of every file: of its time are chunks without a checksum. It is verified, no longer written.
_VERSION, _VERSIONS = 2, (1, 2)
# The directory of OCDBT's data files. Those of at most _SMALL_BYTES are hashed as well: nodes that a later version of
# the tree replaced are in small files of their own, and nothing that is read verifies them.
_DATA, _SMALL_BYTES = "d", 2**20
# Hashing is bound by the disk beyond this; asking a file server for sizes is not.
_THREADS = min(8, os.cpu_count() or 1)
_STAT_THREADS = 16
# With fewer bytes to read, work is over before it could show progress.
LONG = 2**30


@dataclasses.dataclass(frozen=True)
class File:
    """What a file must be.

    Attributes:
      size: in bytes.
      sha256: of the content, in hexadecimal; None where reading the arrays verifies it.
    """

    size: int
    sha256: str | None = None


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What the directory of a step must hold.

    Attributes:
      step: of the checkpoint.
      arrays: number of arrays.
      files: by path relative to the directory, with `/`.
    """

    step: int
    arrays: int
    files: dict[str, File]


def write_manifest(directory: pathlib.Path, arrays: int) -> Manifest:
    """Writes the manifest of a complete checkpoint with this many arrays; replaces an existing one."""
    paths = _files(directory)
    sizes = _in_threads(lambda path: (directory / path).stat().st_size, paths, _STAT_THREADS)
    files = {path: File(size) for path, size in zip(paths, sizes)}
    hashed = [path for path, file in files.items() if _is_hashed(path, file.size)]
    hashes = _in_threads(lambda path: file_sha256(directory / path), hashed)
    files |= {path: File(files[path].size, sha256) for path, sha256 in zip(hashed, hashes)}
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
    """Returns the manifest, or None where there is none.

    Raises:
      CorruptCheckpoint: it is not as it was written, or that of another step or version.
      UserError: it cannot be read for another reason, such as a missing permission.
    """
    try:
        content = json.loads((directory / MANIFEST).read_bytes())
        changed = content.pop("sha256") != _digest(content)
        version = content.pop("version")
        files = {path: File(**file) for path, file in content.pop("files").items()}
        manifest = Manifest(files=files, **content)
    except FileNotFoundError:
        return None
    except OSError as error:
        check_read_failure(directory / MANIFEST, error)
        raise CorruptCheckpoint(f"{MANIFEST} cannot be read ({error.strerror})") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise CorruptCheckpoint(f"{MANIFEST} is not as it was written") from None
    if changed or not all(map(_is_safe, files)):
        raise CorruptCheckpoint(f"{MANIFEST} is not as it was written")
    if version not in _VERSIONS:
        raise CorruptCheckpoint(f"{MANIFEST} has version {version}, this program knows {_VERSION}")
    if manifest.step != int(directory.name):
        raise CorruptCheckpoint(f"{MANIFEST} is that of step {manifest.step}")
    return manifest


def problems(directory: pathlib.Path, items: Collection[str] | None = None, hashes: bool = True) -> list[str] | None:
    """Compares the files of a checkpoint with its manifest.

    Sizes come first; where one differs nothing is read. Files that the manifest does not list do no harm.

    Args:
      directory: of a step.
      items: the subdirectories that matter, and with them the files beside them; None for all.
      hashes: whether to read the files whose SHA-256 the manifest has.

    Returns:
      One line for each file that is not as it was written; empty for a valid checkpoint. None where there is no
      manifest.

    Raises:
      UserError: a file cannot be read for another reason, such as a missing permission.
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
    root = os.path.realpath(directory)
    found = list(_in_threads(lambda path: _size_problem(root, path, files[path].size), files, _STAT_THREADS))
    if hashes and not any(found):
        found = _hash_problems(directory, {path: file for path, file in files.items() if file.sha256 is not None})
    return [problem for problem in found if problem]


def size(directory: pathlib.Path) -> int:
    """Returns the bytes of all files of a checkpoint, without the manifest."""
    return sum((directory / path).stat().st_size for path in _files(directory))


def _is_safe(path: str) -> bool:
    """Returns whether a path that a manifest lists can become a path below the manifest's directory."""
    try:
        safe_paths.check_relative_path(path, MANIFEST)
    except UserError:
        return False
    return True


def _is_hashed(path: str, size: int) -> bool:
    return size <= _SMALL_BYTES or _DATA not in path.split("/")[:-1]


def _files(directory: pathlib.Path) -> list[str]:
    """Returns the paths of all files of a checkpoint but the manifest, sorted."""
    root = os.path.realpath(directory)
    paths = (path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    return sorted(
        path
        for path in paths
        if path not in (MANIFEST, _PARTIAL) and _is_safe(path) and _is_inside(root, f"{root}/{path}")
    )


def _is_inside(root: str, file: str) -> bool:
    """Returns whether a file is below the directory `root`, which has no links in it, once links are followed."""
    return os.path.realpath(file).startswith(f"{root}/")


def _in_threads(function: Callable[[str], Result], paths: Iterable[str], threads: int = _THREADS) -> Iterator[Result]:
    """Yields the results in order. Threads help: hashing releases the interpreter's lock, and file servers are slow."""
    with concurrent.futures.ThreadPoolExecutor(threads, "checkpoint") as pool:
        yield from pool.map(function, paths)


def _size_problem(root: str, path: str, expected: int) -> str | None:
    if not _is_inside(root, f"{root}/{path}"):
        return f"{path} is a link to a file outside of the checkpoint"
    try:
        actual = os.stat(f"{root}/{path}").st_size
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        check_read_failure(pathlib.Path(root, path), error)
        return f"{path} cannot be read ({error.strerror})"
    return f"{path} has {actual} bytes instead of {expected}" if actual != expected else None


def _hash_problems(directory: pathlib.Path, files: dict[str, File]) -> list[str | None]:
    found = _in_threads(lambda path: _hash_problem(directory / path, path, files[path].sha256), files)
    if sum(file.size for file in files.values()) >= LONG:
        found = progress.track(found, f"checking checkpoint {directory.name}", len(files), "files")
    return list(found)


def _hash_problem(file: pathlib.Path, path: str, expected: str | None) -> str | None:
    try:
        return f"{path} has changed" if file_sha256(file) != expected else None
    except OSError as error:
        check_read_failure(file, error)
        return f"{path} cannot be read ({error.strerror})"


def _digest(content: dict) -> str:
    return sha256(json.dumps(content, sort_keys=True))
