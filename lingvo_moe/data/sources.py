"""Where catalogs come from: the interface `Source`, and folders and single files."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from lingvo_moe.data import catalogs
from lingvo_moe.errors import UserError


class Part(NamedTuple):
    """The entries of one file."""

    name: str
    size: float  # its share of its source's size
    entries: Iterator[catalogs.Entry]


class Source(Protocol):
    """Some catalogs."""

    name: str
    size: int  # bytes to read
    links_left_out: int  # symbolic links to catalogs outside of the source, once the parts were read

    def identity(self) -> str:
        """Returns a hash that changes with the content."""

    def parts(self) -> Iterator[Part]:
        """Yields the entries, part by part, in an order that depends on names alone."""


class Folder:
    """The catalogs below a directory (those of some suffixes alone, if need be), or one file.

    A symbolic link counts only where it leads to a file inside of the directory, so that nothing else on the machine
    gets into a corpus.
    """

    def __init__(self, name: str, root: Path, suffixes: Collection[str] = catalogs.SUFFIXES):
        self.name = name
        self._root = root if root.is_dir() else root.parent
        found = sorted(_walk(root), key=lambda path: path.relative_to(root).parts) if root.is_dir() else [root]
        found = [path for path in found if path.suffix in suffixes]
        self._files = [path for path in found if _is_inside(path, self._root)]
        self.links_left_out = len(found) - len(self._files)
        self.size = sum(path.stat().st_size for path in self._files)

    def identity(self) -> str:
        return combined_hash((str(path.relative_to(self._root)), path) for path in self._files)

    def parts(self) -> Iterator[Part]:
        for path in self._files:
            name = path.relative_to(self._root)
            yield Part(f"{self.name}/{name}", path.stat().st_size, catalogs.read(path, name))


def default_directory() -> Path:
    """Where packages are kept if nobody says otherwise: below the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lingvo_moe" / "packages"


def django() -> Source:
    """The catalogs of the installed PyPI package Django, which is found but not imported."""
    spec = importlib.util.find_spec("django")
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            "this preset reads Django's translations, and Django is not installed. "
            "Install it: pip install Django==5.2.8."
        )
    return Folder("Django", Path(spec.submodule_search_locations[0]), suffixes=(".mo",))


def own(path: str) -> Source:
    """A directory or file of the user's own. Raises UserError if there is nothing to read."""
    root = Path(os.path.realpath(path))
    if not root.exists():
        raise UserError(f"--input={path}: no such file or directory.")
    if root.is_file() and root.suffix not in catalogs.SUFFIXES:
        raise UserError(f"--input={path}: expected a .tsv, .po, .mo or MediaWiki .json file, or a directory of them.")
    folder = Folder(root.name, root)
    if not folder.size:
        raise UserError(f"--input={path}: no .tsv, .po, .mo or .json file in this directory, or only empty ones.")
    return folder


def sha256(path: Path) -> str:
    """Returns the hash of a file's content, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def combined_hash(files: Iterable[tuple[str, Path]]) -> str:
    """Returns a hash of the names given to the files and of their contents."""
    return hashlib.sha256("".join(f"{name}\t{sha256(path)}\n" for name, path in files).encode()).hexdigest()


def _walk(root: Path) -> Iterator[Path]:
    """Yields the files below `root` that are named like catalogs; linked directories are not entered."""
    for directory, _, names in os.walk(root):
        paths = (Path(directory, name) for name in names)
        yield from (path for path in paths if path.suffix in catalogs.SUFFIXES and path.is_file())


def _is_inside(path: Path, root: Path) -> bool:
    return not path.is_symlink() or path.resolve().is_relative_to(root.resolve())
