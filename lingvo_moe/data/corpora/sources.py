"""Data sources: where the translation catalogs of a corpus come from.

`tools.build_corpus --preset=NAME` reads the sources that are registered under NAME. A preset of one's own is a function
in a file of one's own, passed with `--import`:

    @register_source("proverbs")
    def proverbs(cache: Path, selected: Collection[str]) -> SourceList:
        entries = [Entry("de", "Practice makes perfect.", "Übung macht den Meister.")]
        return SourceList([EntrySource("proverbs", entries)])
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import NamedTuple, Protocol

from lingvo_moe import definitions
from lingvo_moe.data import languages
from lingvo_moe.data.corpora import catalogs, unread
from lingvo_moe.errors import UserError
from lingvo_moe.extensions import Registry
from lingvo_moe.utils import user_cache
from lingvo_moe.utils.hashes import file_sha256, sha256


class CatalogFile(NamedTuple):
    """The entries of one file of a source."""

    name: str
    size: float  # bytes of its source's size, for the progress bar
    entries: Iterator[catalogs.Entry]


class Source(Protocol):
    """A collection of translation catalogs.

    Attributes:
      name: short and without machine paths; the corpus manifest lists it.
      size: bytes to read, for the progress bar.
      skipped_links: how many symbolic links to catalogs outside of the source were skipped; known once `files` is
        exhausted.
    """

    name: str
    size: int
    skipped_links: int

    def identity(self) -> str:
        """Returns a hash of the content: a corpus is rebuilt when it changes."""
        ...

    def files(self) -> Iterator[CatalogFile]:
        """Yields the source's files in an order that depends on their names alone."""
        ...


class SourceList(NamedTuple):
    """What a preset reads.

    Attributes:
      sources: read in this order.
      missing_packages: names of packages that the preset asks for and that could not be found; the report warns of
        them.
      languages: what is read if the user selects no languages; empty for all.
    """

    sources: Sequence[Source]
    missing_packages: Sequence[str] = ()
    languages: Collection[str] = ()


# Called with the download cache, which it creates if it needs it, and with the selected languages (empty: all). Entries
# of other languages are skipped, so it need not fetch or read them.
Preset = Callable[[Path, Collection[str]], SourceList]
PRESETS: Registry[Preset] = Registry(
    "preset", check=lambda what, preset: definitions.check_call(what, preset, "cache", "selected")
)


def register_source(name: str) -> Callable[[Preset], Preset]:
    """Function decorator: makes the function's sources available as `tools.build_corpus --preset=NAME`.

    The function takes the download cache's directory and the selected languages, and returns a `SourceList`; it raises
    UserError if a source cannot be fetched.

    Args:
      name: of the preset.

    Raises:
      UserError: the name is missing, malformed or belongs to another function; or the function has other parameters.
    """
    return PRESETS.decorator("register_source", name)


def of_preset(name: str, cache: Path, selected: Collection[str]) -> SourceList:
    """Returns the sources of a preset, which it may download.

    Raises:
      UserError: an unknown preset, one that returns no `SourceList`, or as the preset.
    """
    preset = PRESETS.get(name)
    with definitions.named(lambda: f"preset {name!r}", preset):
        found = preset(cache, selected)
        definitions.check_type(f"preset {name!r}: the result", found, SourceList)
    return found


def checked(entries: Iterable[catalogs.Entry], source: str) -> Iterator[catalogs.Entry]:
    """Yields entries; raises UserError, with the name of their source, for what is no `Entry` of texts."""
    for entry in entries:
        definitions.check_type(f"source {source}: an entry", entry, catalogs.Entry)
        if not isinstance(entry.english, str) or not isinstance(entry.translation, str):
            raise UserError(
                f"source {source}: {entry} has no two texts; expected Entry(language, english, translation)."
            )
        yield entry


class CatalogDirectory:
    """The catalogs below a directory (optionally of some suffixes or languages alone), or a single catalog file.

    A symbolic link counts only if it leads to a file inside of the directory, so no other file of the machine can get
    into a corpus.

    If the directory's own name is that of a language, it is as if it were inside of the directory: `--input=de`.
    """

    def __init__(
        self,
        name: str,
        root: Path,
        suffixes: Collection[str] = catalogs.SUFFIXES,
        selected: Collection[str] = (),
    ):
        self.name = name
        self._is_file = not root.is_dir()
        self._root = root.parent if self._is_file else root
        walked = [root] if self._is_file else _walk(root, suffixes)
        paths = [
            path
            for path in sorted(walked, key=lambda path: path.relative_to(self._root).parts)
            if path.suffix in suffixes
            and languages.is_selected(catalogs.language_by_path(self._path_inside(path)), selected)
        ]
        self._paths = [path for path in paths if _is_inside(path, self._root)]
        self.skipped_links = len(paths) - len(self._paths)
        self.size = sum(path.stat().st_size for path in self._paths)
        for path in self._paths:
            _check_name(path)

    def identity(self) -> str:
        """Returns a hash of the relative paths and contents of the catalogs, and of the English JSON beside them."""
        english = {path.with_name(catalogs.ENGLISH_JSON) for path in self._paths if path.suffix == ".json"}
        read = sorted({*self._paths, *filter(Path.is_file, english)})
        return combined_hash((str(self._path_inside(path)), path) for path in read)

    def files(self) -> Iterator[CatalogFile]:
        """Yields the catalogs in the order of their paths."""
        for path in self._paths:
            name = self.name if self._is_file else f"{self.name}/{path.relative_to(self._root)}"
            yield CatalogFile(name, path.stat().st_size, catalogs.read(path, self._path_inside(path)))

    def _path_inside(self, path: Path) -> PurePath:
        """Returns a file's path inside of the source, after the end of the directory's that names a language."""
        return _named_language(self._root) / path.relative_to(self._root)


class EntrySource:
    """Entries in memory: the simplest source for a preset of one's own."""

    def __init__(self, name: str, entries: Iterable[catalogs.Entry]):
        self.name = name
        self.skipped_links = 0
        self._entries = tuple(checked(entries, name))
        self.size = sum(len(entry.english.encode()) + len(entry.translation.encode()) for entry in self._entries)

    def identity(self) -> str:
        """Returns a hash of the entries."""
        return sha256(repr([tuple(entry) for entry in self._entries]))

    def files(self) -> Iterator[CatalogFile]:
        """Yields all entries as one file."""
        yield CatalogFile(self.name, self.size, iter(self._entries))


def default_cache() -> Path:
    """Returns the default directory for downloaded packages, below `user_cache.directory()`."""
    return user_cache.directory() / "packages"


@register_source("django")
def django_preset(cache: Path, selected: Collection[str]) -> SourceList:
    """The catalogs of the installed Django alone; nothing is downloaded."""
    del cache
    return SourceList([django(selected)])


@register_source("none")
def no_preset(cache: Path, selected: Collection[str]) -> SourceList:
    """No source: the user's own inputs alone."""
    del cache, selected
    return SourceList([])


def django(selected: Collection[str] = ()) -> Source:
    """Returns the catalogs of the installed PyPI package Django, which is located but not imported."""
    spec = importlib.util.find_spec("django")
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            "this preset reads Django's translations, and Django is not installed. "
            "Install it: pip install Django==5.2.8."
        )
    return CatalogDirectory("Django", Path(spec.submodule_search_locations[0]), (".mo",), selected)


def user_input(path: str | Path, flag: str = "--input") -> Source:
    """Returns the catalogs of a user's directory or file. Raises UserError, with the flag, if there is none."""
    root = Path(os.path.realpath(path))
    if not root.exists():
        raise UserError(f"{flag}={path}: no such file or directory.")
    if root.is_file() and root.suffix not in catalogs.SUFFIXES:
        raise UserError(
            f"{flag}={path}: expected a .tsv, .po, .mo or .json file, or a directory of them. Convert other formats to "
            ".po or .tsv (docs/own_texts.md)."
        )
    if root.is_file() and root.suffix == ".json":
        _check_json(root, f"{flag}={path}")
    source = CatalogDirectory(root.name, root)
    if not source.size:
        reasons = "; ".join(["no .tsv, .po, .mo or .json file in it, or only empty ones", *unread.warnings([root])])
        raise UserError(f"{flag}={path}: {reasons.removesuffix('.')}.")
    return source


def _check_json(path: Path, flag: str):
    """Raises UserError, with the flag and its value, for a JSON file that has no entries."""
    if languages.normalize(path.stem) is None:
        raise UserError(f"{flag}: expected a name after its language, such as de.json. Rename the file.")
    if catalogs.lacks_english(path):
        raise UserError(f"{flag}: {unread.ENGLISH_MISSING}. Add that file.")


def combined_hash(files: Iterable[tuple[str, Path]]) -> str:
    """Returns a hash of the names given to the files and of their contents."""
    return sha256("".join(f"{name}\t{file_sha256(path)}\n" for name, path in files))


def _walk(root: Path, suffixes: Collection[str]) -> Iterator[Path]:
    """Yields the files below `root` with one of the suffixes; linked directories are not entered."""
    for directory, _, names in os.walk(root, onerror=_refuse):
        paths = (Path(directory, name) for name in names)
        yield from (path for path in paths if path.suffix in suffixes and path.is_file())


def _named_language(directory: Path) -> PurePath:
    """Returns the end of a directory's path that names the language of the catalogs in it; empty if there is none."""
    if directory.name == "LC_MESSAGES":
        return PurePath(directory.parent.name, directory.name)
    return PurePath(directory.name if languages.names_language(directory.name) else "")


def _refuse(error: OSError):
    """Raises UserError for a directory that cannot be read: its catalogs would be missing without a word."""
    raise UserError(f"{error.filename}: this directory cannot be read ({error.strerror}).") from None


def _check_name(path: Path):
    """Raises UserError for a name that no manifest can have."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UserError(f"{os.fsencode(path)!r}: the name of this file is not UTF-8; rename it.") from None


def _is_inside(path: Path, root: Path) -> bool:
    return not path.is_symlink() or path.resolve().is_relative_to(root.resolve())
