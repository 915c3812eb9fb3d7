"""Catalogs in Debian packages, and the translated package descriptions: the preset `debian`.

apt downloads the packages, with its lists and its cache in a directory of ours: the system's own apt state is neither
used nor changed. A file that is there with the right hash is not downloaded again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import subprocess
import urllib.parse
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from lingvo_moe.data import languages
from lingvo_moe.data.corpora import catalogs
from lingvo_moe.data.corpora.sources import (
    CatalogDirectory,
    CatalogFile,
    SourceList,
    combined_hash,
    register_source,
)
from lingvo_moe.errors import UserError
from lingvo_moe.utils import file_lock, output_files, progress, safe_paths, temporary_directories
from lingvo_moe.utils.hashes import file_sha256, sha256

_logger = logging.getLogger(__name__)

APPLICATIONS = tuple(
    (
        "mediawiki evolution-common gramps vlc-l10n gnucash-common wordpress-l10n pidgin-data libgtk-3-common "
        "gnome-control-center-data cinnamon-l10n kio krita-l10n caja-common gnumeric-common aisleriot nautilus-data "
        "thunar-data"
    ).split()
)
# LibreOffice has a package per language; these are the ones with little other text.
_ONE_LANGUAGE = {
    f"libreoffice-l10n-{language}": language
    for language in "ve nr ss st tn rw ts gug om szl nso zu kmr mn xh am uz ga tg br af ka kk dz si gd or ne".split()
}
PACKAGES = (*APPLICATIONS, *_ONE_LANGUAGE)
DESCRIPTION_LANGUAGES = tuple(
    (
        "ca cs da de el en eo es eu fi fr gl hr hu id it ja km ko nb nl pl pt pt_BR ro ru sk sr sv tr uk vi zh_CN zh_TW"
    ).split()
)
_MAX_MISSING = 0.25  # of the packages
# Packages of one call of apt, which reads its lists for a second first.
_AT_ONCE = 12
_INDEX_VERSION = 3  # 2 was one file for all presets

# Read after the system's configuration. Images without translations say Acquire::Languages "none".
_CONFIGURATION = """\
Dir::State::Lists "{lists}";
Dir::Cache "{cache}";
Acquire::GzipIndexes "false";
#clear Acquire::Languages;
Acquire::Languages {{ {languages} }};
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
"""
_LISTS = "*_i18n_Translation-*"
_PARAGRAPH = "\n .\n"
_STANZA = re.compile(
    r"^Description-md5: (?P<digest>\w+)\nDescription-\w+: (?P<summary>.*)(?P<body>(?:\n .*)*)", re.MULTILINE
)


class Archive(NamedTuple):
    """A package as apt would download it."""

    name: str
    file: str
    sha256: str


class Package:
    """A downloaded package; `files` unpacks it into a temporary directory while it is read.

    Args:
      path: of the package.
      selected: the languages whose catalogs are read; empty for all.
      suffixes: of the catalogs to read.
      english: a package to unpack into the same directory, for catalogs whose English texts are in a package of their
        own.
    """

    def __init__(
        self,
        path: Path,
        selected: Collection[str] = (),
        suffixes: Collection[str] = catalogs.SUFFIXES,
        english: Path | None = None,
    ):
        self.name = path.name
        self.size = path.stat().st_size
        self.skipped_links = 0
        self._path, self._selected, self._suffixes = path, selected, suffixes
        self._archives = [path] if english is None else [english, path]

    def identity(self) -> str:
        """Returns the hash of the archive, or of both archives."""
        hashes = [file_sha256(path) for path in self._archives]
        return hashes[0] if len(hashes) == 1 else sha256("".join(hashes))

    def files(self) -> Iterator[CatalogFile]:
        """Yields the catalogs in the package. dpkg-deb and tar refuse members outside of the directory."""
        with temporary_directories.make("unpacked-", self._path.parent) as directory:
            for path in self._archives:
                unpack(path, directory)
            catalogs_inside = CatalogDirectory(self.name, directory, self._suffixes, self._selected)
            self.skipped_links = catalogs_inside.skipped_links
            # The progress bar counts downloaded bytes: a file counts with its compressed size.
            compression = self.size / max(catalogs_inside.size, 1)
            for file in catalogs_inside.files():
                yield file._replace(size=file.size * compression)


class Descriptions:
    """The translated package descriptions: apt's lists `..._Translation-LANG`, paired by the English text's MD5."""

    def __init__(self, lists: Path, selected: Collection[str] = ()):
        self.name = "package descriptions"
        self.skipped_links = 0
        paths = sorted(lists.glob(_LISTS))
        read = {*selected, "en"} if selected else ()
        self._paths = [path for path in paths if languages.is_selected(_language(path), read)]
        self.size = sum(path.stat().st_size for path in self._paths)

    def identity(self) -> str:
        """Returns a hash of the lists' names and contents."""
        return combined_hash((path.name, path) for path in self._paths)

    def files(self) -> Iterator[CatalogFile]:
        """Yields the English lists, without entries, then the other languages' lists."""
        english: dict[str, list[str]] = {}
        for path in self._paths:
            if _language(path) == "en":
                english.update(_descriptions(path))
                yield CatalogFile(path.name, path.stat().st_size, iter(()))
        for path in self._paths:
            if _language(path) != "en":
                yield CatalogFile(path.name, path.stat().st_size, _translations(path, english))


@register_source("debian")
def debian_preset(cache: Path, selected: Collection[str]) -> SourceList:
    """Packages with catalogs, and the descriptions of all packages; see `fetch` and `fetch_descriptions`."""
    fetched = fetch(cache, packages(selected), selected)
    return fetched._replace(sources=[*fetched.sources, fetch_descriptions(cache, selected)])


def packages(selected: Collection[str] = ()) -> list[str]:
    """Returns the packages of the preset that have catalogs in the selected languages (empty: in any)."""
    return [name for name in PACKAGES if languages.is_selected(_ONE_LANGUAGE.get(name), selected)]


def fetch(cache: Path, names: Sequence[str], selected: Collection[str] = ()) -> SourceList:
    """Returns the catalogs of packages, downloading what `cache` lacks.

    Args:
      cache: the download cache.
      names: of the packages.
      selected: the languages to read; empty for all.

    Raises:
      UserError: as `fetch_archives`.
    """
    archives = fetch_archives(cache, names)
    return SourceList(
        [Package(path, selected) for path in archives.values()], [name for name in names if name not in archives]
    )


def fetch_archives(cache: Path, names: Sequence[str]) -> dict[str, Path]:
    """Returns the paths of packages by name, downloading what `cache` lacks; without those the distribution lacks.

    Args:
      cache: the download cache.
      names: of the packages.

    Raises:
      UserError: apt is absent, its lists or a package cannot be downloaded, or a quarter of the packages is unknown.
    """
    cache = cache.absolute()
    cache.mkdir(parents=True, exist_ok=True)
    archives = _read_index(cache, names)
    if archives is None or not all(_is_intact(cache, archive) for archive in archives):
        with file_lock.locked(cache / "lock"):  # apt's lists and its configuration are those of all processes
            apt = _Apt(cache)
            apt.update()
            archives = apt.available(names)
            _download_missing(apt, cache, names, archives)
    return {archive.name: cache / archive.file for archive in archives}


def fetch_descriptions(cache: Path, selected: Collection[str] = ()) -> Descriptions:
    """Returns the descriptions of all packages, downloading apt's lists if `cache` lacks one that is read.

    They are downloaded in all languages: apt would delete those that other corpora are built from.

    Args:
      cache: the download cache.
      selected: the languages to read; empty for all.

    Raises:
      UserError: apt is absent, or its lists cannot be downloaded.
    """
    cache = cache.absolute()
    cache.mkdir(parents=True, exist_ok=True)
    lists = cache / "lists"
    if _missing_languages(lists, selected):
        with file_lock.locked(cache / "lock"):
            _Apt(cache).update()
        if missing := _missing_languages(lists, selected):
            _logger.warning(
                "apt has no package descriptions in %s; the corpus is built without them", ", ".join(missing)
            )
    return Descriptions(lists, selected)


def _missing_languages(lists: Path, selected: Collection[str]) -> list[str]:
    """Returns the languages of descriptions, among those that are read, without a list."""
    read = {*selected, "en"} if selected else ()
    known = {languages.normalize(language) for language in DESCRIPTION_LANGUAGES}
    found = {_language(path) for path in lists.glob(_LISTS)}
    return sorted(language for language in known - found if language and languages.is_selected(language, read))


def unpack(path: Path, directory: Path):
    """Unpacks a package. dpkg-deb and tar refuse members outside of the directory.

    Raises:
      UserError: the package is damaged.
    """
    unpacked = subprocess.run(["dpkg-deb", "--extract", path, directory], capture_output=True, text=True)
    if unpacked.returncode:
        raise UserError(f"{path}: cannot be unpacked ({_reason(unpacked)}). Delete it and run the same command again.")


def _download_missing(apt: _Apt, cache: Path, names: Sequence[str], archives: Sequence[Archive]):
    missing = [archive for archive in archives if not _is_intact(cache, archive)]
    with progress.bar("downloading packages", len(archives), "packages", done=len(archives) - len(missing)) as advance:
        for first in range(0, len(missing), _AT_ONCE):
            batch = missing[first : first + _AT_ONCE]
            advance(0, batch[0].name)
            apt.download(batch)
            advance(len(batch))
    index = {
        "version": _INDEX_VERSION,
        "requested": list(names),
        "archives": [archive._asdict() for archive in archives],
    }
    with output_files.atomic_path(_index_path(cache, names)) as partial:
        partial.write_text(json.dumps(index, indent=1))


def _index_path(cache: Path, names: Sequence[str]) -> Path:
    """Returns the index of this list of packages: each preset and selection has one."""
    digest = sha256("\n".join(names))[:12]
    return cache / f"packages-{digest}.json"


def _read_index(cache: Path, names: Sequence[str]) -> list[Archive] | None:
    """Returns what an earlier, complete run downloaded; None if there was none, or it requested other packages.

    Raises:
      UserError: the index names a file outside of the cache.
    """
    path = _index_path(cache, names)
    try:
        index = json.loads(path.read_text())
        if (index["version"], index["requested"]) != (_INDEX_VERSION, list(names)):
            return None
        archives = [Archive(**archive) for archive in index["archives"]]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    for archive in archives:
        safe_paths.check_file_name(archive.file, f"{path}, field file")
    return archives


def _is_intact(directory: Path, archive: Archive) -> bool:
    path = directory / archive.file
    return path.is_file() and file_sha256(path) == archive.sha256


class _Apt:
    """apt with its state in a directory of ours.

    Args:
      directory: for apt's lists, cache and configuration, and for the downloaded packages.

    Raises:
      UserError: a tool is not installed.
    """

    def __init__(self, directory: Path):
        for tool in ("apt-get", "apt-cache", "dpkg-deb"):
            if shutil.which(tool) is None:
                raise UserError(
                    f"this preset needs {tool}, which this machine does not have. "
                    "Use Debian or Ubuntu, or --preset=pypi."
                )
        self._directory = directory
        self._partial = directory / "partial"
        for folder in (directory / "lists" / "partial", directory / "apt" / "archives" / "partial", self._partial):
            folder.mkdir(parents=True, exist_ok=True)
        if os.geteuid() == 0:
            # Run as root, apt downloads as the user _apt, if that user can write here.
            with contextlib.suppress(LookupError):
                shutil.chown(self._partial, "_apt")
        self._configuration = directory / "apt.conf"
        self._configuration.write_text(
            _CONFIGURATION.format(
                lists=directory / "lists",
                cache=directory / "apt",
                languages=" ".join(f'"{language}";' for language in DESCRIPTION_LANGUAGES),
            )
        )

    def update(self):
        """Downloads the lists of packages and descriptions. Raises UserError if there is none afterwards."""
        with progress.bar("downloading the lists of packages", None, "lists") as advance:
            updated = self._run("apt-get", "update")
            advance()
        # A broken third-party source makes the update fail although Debian's own lists are there.
        if not Descriptions(self._directory / "lists").size:
            raise UserError(
                f"apt-get update downloaded no package lists ({_reason(updated)}). Check the network and "
                "apt's sources, then run the same command again."
            )

    def available(self, names: Sequence[str]) -> list[Archive]:
        """Returns the packages that the distribution has. Raises UserError if a quarter or more of them is missing."""
        policy = self._run("apt-cache", "policy", *names).stdout
        versions = re.findall(r"^(\S+):\n  Installed: .*\n  Candidate: (.*)$", policy, re.MULTILINE)
        candidates = {name for name, candidate in versions if candidate != "(none)"}
        known = [name for name in names if name in candidates]
        missing = [name for name in names if name not in candidates]
        if len(missing) >= _MAX_MISSING * len(names):
            raise UserError(
                f"this distribution has {len(known)} of the {len(names)} packages; missing are "
                f"{', '.join(missing[:5])}{', ...' * (len(missing) > 5)}. Presets of packages are for Debian 12 with "
                "the component main."
            )
        answer = self._run("apt-get", "download", "--print-uris", *known)
        lines = re.findall(r"^'\S+' ([^\s/]+) \d+ SHA256:([0-9a-f]{64})", answer.stdout, re.MULTILINE)
        by_name = {file.partition("_")[0]: Archive(file.partition("_")[0], file, digest) for file, digest in lines}
        if by_name.keys() != candidates:
            unknown = min(candidates - by_name.keys(), default="")
            raise UserError(f"apt-get download has no address for {unknown} ({_reason(answer)}).")
        return [by_name[name] for name in known]

    def download(self, archives: Sequence[Archive]):
        """Downloads packages; each gets its final name only when it is complete.

        Raises:
          UserError: a package cannot be downloaded; it is named. The others are kept.
        """
        finished = self._run("apt-get", "download", *(archive.name for archive in archives), cwd=self._partial)
        complete = [archive for archive in archives if _is_intact(self._partial, archive)]
        for archive in complete:
            (self._partial / archive.file).replace(self._directory / archive.file)
        failed = [archive.name for archive in archives if archive not in complete]
        if failed:
            raise UserError(
                f"cannot download the package {failed[0]} ({_reason(finished)}). Check the network and "
                "run the same command again; completed downloads are kept."
            )

    def _run(self, tool: str, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess:
        return subprocess.run(
            [tool, f"--config-file={self._configuration}", "-q", *arguments],
            cwd=cwd,
            text=True,
            errors="replace",
            capture_output=True,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "LC_ALL": "C"},
        )


def _reason(finished: subprocess.CompletedProcess) -> str:
    """Returns a command's first error (else its first message) as one line."""
    lines = [line.strip() for line in finished.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("E:", "dpkg-deb: error"))]
    return next(iter(errors or lines), f"exit status {finished.returncode}")


def _language(path: Path) -> str | None:
    # apt writes the underscore of pt_BR as %5f.
    return languages.normalize(urllib.parse.unquote(path.name.rpartition("Translation-")[2]))


def _translations(path: Path, english: dict[str, list[str]]) -> Iterator[catalogs.Entry]:
    language = _language(path)
    for digest, paragraphs in _descriptions(path):
        originals = english.get(digest, [])
        # If the numbers of paragraphs differ, only the first paragraphs are known to correspond.
        count = len(originals) if len(originals) == len(paragraphs) else 1
        for original, paragraph in zip(originals[:count], paragraphs):
            yield catalogs.Entry(language, original, paragraph)


def _descriptions(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yields the MD5 of each package's English description, and its paragraphs, the one-line summary first."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 (byte {error.start}). Delete it and run the same command again.") from None
    for stanza in text.split("\n\n"):
        fields = _STANZA.search(stanza)
        if fields:
            yield fields["digest"], [fields["summary"], *fields["body"].split(_PARAGRAPH)]
