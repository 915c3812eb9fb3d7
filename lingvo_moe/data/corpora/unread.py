"""Files of a user's own directories that no reader takes, so that their texts are not missing without a word.

Presets are not checked: a package has thousands of files that are no catalogs.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from lingvo_moe.data import languages
from lingvo_moe.data.corpora import catalogs
from lingvo_moe.data.corpora.corpus_report import listing
from lingvo_moe.utils.counts import counted

ENGLISH_MISSING = f"there is no {catalogs.ENGLISH_JSON} beside it, which has the English texts by the same keys"
# Names, without their suffixes, of files that are in many directories and are no catalogs. qqq.json explains messages.
_OTHER_NAMES = frozenset(
    "authors changelog changes composer contributing copying credits install licence license manifest news notice "
    "package package-lock qqq readme todo tsconfig".split()
)
# Documentation, pictures, code, and templates of .po files, which have no translations.
_OTHER_SUFFIXES = frozenset(".md .rst .png .jpg .jpeg .gif .svg .ico .py .sh .c .h .cpp .css .pot .po~".split())


class _Found(NamedTuple):
    """Files that are not read, each as the name of its directory and its path in it."""

    other: list[Path]
    without_english: list[Path]
    irregular: list[Path]


def warnings(inputs: Iterable[str | Path]) -> list[str]:
    """Returns sentences about the files of the user's directories that are not read: at most one for each reason.

    Args:
      inputs: directories and files. A file has been checked by itself, see `sources.user_input`.
    """
    found = _Found([], [], [])
    for root in dict.fromkeys(Path(os.path.realpath(path)) for path in inputs):
        for path in _files(root):
            name = Path(root.name, path.relative_to(root))
            if path.suffix in catalogs.SUFFIXES and not _is_regular(path, root):
                found.irregular.append(name)
            elif catalogs.lacks_english(path):
                found.without_english.append(name)
            elif not _is_read(path):
                found.other.append(name)
    return [
        *_without_english(sorted(found.without_english)),
        *_other_formats(sorted(found.other)),
        *_irregular(sorted(found.irregular)),
    ]


def _without_english(names: list[Path]) -> Iterator[str]:
    if names:
        more = len(names) - 1
        others = f", nor beside {counted(more, 'more file')}" if more else ""
        yield f"{names[0]}: {ENGLISH_MISSING}{others}; not read. Add that file."


def _other_formats(names: list[Path]) -> Iterator[str]:
    formats = listing(collections.Counter(name.suffix for name in names))
    if len(names) == 1:
        yield f"a file of another format was not read: {names[0]}. Convert it to .po or .tsv (docs/own_texts.md)."
    elif names:
        yield (
            f"{len(names)} files of other formats were not read: {formats}, such as {names[0]}. Convert them to .po or "
            ".tsv (docs/own_texts.md)."
        )


def _irregular(names: list[Path]) -> Iterator[str]:
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"not read, as a pipe, or a link to nothing or out of the input: {names[0]}{more}. Put a copy there."


def _is_regular(path: Path, root: Path) -> bool:
    """Returns whether a path is a file, or a link to one below `root`; `sources.CatalogDirectory` reads no other."""
    return path.is_file() and (not path.is_symlink() or path.resolve().is_relative_to(root))


def _files(root: Path) -> Iterator[Path]:
    """Yields the files below a directory that may be catalogs: neither hidden nor, by their names, something else."""
    for directory, below, names in os.walk(root):
        below[:] = [name for name in below if not name.startswith(".")]
        for name in names:
            path = Path(directory, name)
            is_other = path.stem.lower() in _OTHER_NAMES or path.suffix.lower() in _OTHER_SUFFIXES
            if path.suffix and not name.startswith(".") and not is_other:
                yield path


def _is_read(path: Path) -> bool:
    """Returns whether a reader takes the file; of JSON files, those that are named after their language."""
    return path.suffix in catalogs.SUFFIXES and (path.suffix != ".json" or languages.normalize(path.stem) is not None)
