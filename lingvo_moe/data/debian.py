"""The preset debian: catalogs in Debian packages, and the package descriptions that Debian's translators wrote.

apt does the fetching, with its lists and its cache in a directory of ours: the system's own state is neither needed nor
touched. What is there and has the right hash is not fetched again.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from lingvo_moe.data import catalogs, languages
from lingvo_moe.data.sources import Folder, Part, Source, combined_hash, sha256
from lingvo_moe.errors import UserError
from lingvo_moe.utils import progress

PACKAGES = tuple(
    (
        "mediawiki evolution-common gramps vlc-l10n gnucash-common wordpress-l10n pidgin-data libgtk-3-common "
        "gnome-control-center-data cinnamon-l10n kio krita-l10n caja-common gnumeric-common aisleriot nautilus-data "
        "thunar-data"
    ).split()
) + tuple(
    f"libreoffice-l10n-{language}"
    for language in ("ve nr ss st tn rw ts gug om szl nso zu kmr mn xh am uz ga tg br af ka kk dz si gd or ne").split()
)
DESCRIPTION_LANGUAGES = tuple(
    (
        "ca cs da de el en eo es eu fi fr gl hr hu id it ja km ko ml nb nl pl pt pt_BR ro ru sk sr sv tr uk vi "
        "zh_CN zh_TW"
    ).split()
)
_MOST_MISSING = 0.25
_PLAN = "packages.json"

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
APT::Sandbox::User "root";
"""
_PARAGRAPH = "\n .\n"
_STANZA = re.compile(
    r"^Description-md5: (?P<digest>\w+)\nDescription-\w+: (?P<summary>.*)(?P<body>(?:\n .*)*)", re.MULTILINE
)


class Archive(NamedTuple):
    """A package as apt would fetch it."""

    name: str
    file: str
    sha256: str


class Package:
    """A fetched package, unpacked while it is read."""

    def __init__(self, path: Path):
        self.name = path.name
        self.size = path.stat().st_size
        self.links_left_out = 0
        self._path = path

    def identity(self) -> str:
        return sha256(self._path)

    def parts(self) -> Iterator[Part]:
        with tempfile.TemporaryDirectory(prefix="unpacked-", dir=self._path.parent) as directory:
            unpacked = subprocess.run(["dpkg-deb", "--extract", self._path, directory], capture_output=True, text=True)
            if unpacked.returncode:
                raise UserError(f"{self._path}: cannot be unpacked ({_reason(unpacked)}). Delete it and run again.")
            folder = Folder(self.name, Path(directory))
            self.links_left_out = folder.links_left_out
            # The bar counts what was fetched: a file inside is a share of its package.
            compression = self.size / max(folder.size, 1)
            for part in folder.parts():
                yield part._replace(size=part.size * compression)


class Descriptions:
    """All packages' descriptions, translated: apt's lists `..._Translation-LANG`, paired by the English text's MD5."""

    name = "package descriptions"
    links_left_out = 0

    def __init__(self, lists: Path):
        self._files = sorted(lists.glob("*_i18n_Translation-*"))
        self.size = sum(path.stat().st_size for path in self._files)

    def identity(self) -> str:
        return combined_hash((path.name, path) for path in self._files)

    def parts(self) -> Iterator[Part]:
        english = {}
        for path in self._files:
            if _language(path) == "en":
                english.update(_descriptions(path))
                yield Part(path.name, path.stat().st_size, iter(()))
        for path in self._files:
            if _language(path) != "en":
                yield Part(path.name, path.stat().st_size, _translated(path, english))


def fetch(directory: Path) -> tuple[list[Source], list[str]]:
    """Fetches what is not there yet.

    Returns:
      the packages and descriptions, and the names of the packages that the distribution does not have.

    Raises:
      UserError: apt is absent, its lists or a package cannot be fetched, or a quarter of the packages is unknown.
    """
    directory = directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    plan = _read_plan(directory)
    if plan is None or not all(_is_intact(directory, archive) for archive in plan):
        apt = _Apt(directory)
        apt.update()
        plan = apt.plan()
        _fetch_missing(apt, directory, plan)
    found = [Package(directory / archive.file) for archive in plan]
    known = {archive.name for archive in plan}
    return [*found, Descriptions(directory / "lists")], [name for name in PACKAGES if name not in known]


def _fetch_missing(apt: _Apt, directory: Path, plan: Sequence[Archive]):
    wanted = [archive for archive in plan if not _is_intact(directory, archive)]
    with progress.bar("fetching packages", len(plan), "packages", done=len(plan) - len(wanted)) as advance:
        for archive in wanted:
            advance(0, archive.name)
            apt.download(archive)
            advance()
    text = json.dumps({"wanted": PACKAGES, "found": [archive._asdict() for archive in plan]}, indent=1)
    beside = directory / f".{_PLAN}.partial"
    beside.write_text(text)
    beside.replace(directory / _PLAN)


def _read_plan(directory: Path) -> list[Archive] | None:
    """What an earlier, completed run fetched; None if there was none, or it wanted other packages."""
    try:
        written = json.loads((directory / _PLAN).read_text())
        plan = [Archive(**archive) for archive in written["found"]]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    is_ours = written["wanted"] == list(PACKAGES) and all(Path(archive.file).name == archive.file for archive in plan)
    return plan if is_ours else None


def _is_intact(directory: Path, archive: Archive) -> bool:
    path = directory / archive.file
    return path.is_file() and sha256(path) == archive.sha256


class _Apt:
    """apt with its state in a directory of ours."""

    def __init__(self, directory: Path):
        for tool in ("apt-get", "apt-cache", "dpkg-deb"):
            if shutil.which(tool) is None:
                raise UserError(
                    f"the preset debian needs {tool}, which this machine does not have. "
                    "Use Debian or Ubuntu, or --preset=quickstart."
                )
        self._directory = directory
        self._partial = directory / "partial"
        for folder in (directory / "lists" / "partial", directory / "apt" / "archives" / "partial", self._partial):
            folder.mkdir(parents=True, exist_ok=True)
        self._configuration = directory / "apt.conf"
        self._configuration.write_text(
            _CONFIGURATION.format(
                lists=directory / "lists",
                cache=directory / "apt",
                languages=" ".join(f'"{language}";' for language in DESCRIPTION_LANGUAGES),
            )
        )

    def update(self):
        """Fetches the lists of packages and descriptions. Raises UserError if that leaves none."""
        with progress.bar("fetching the lists of packages", None, "lists") as advance:
            updated = self._run("apt-get", "update")
            advance()
        # A broken third-party source fails the update, yet Debian's own lists are there.
        if not Descriptions(self._directory / "lists").size:
            raise UserError(
                f"apt-get update brought no package lists ({_reason(updated)}). Check the network and "
                "apt's sources, then run the same command again."
            )

    def plan(self) -> list[Archive]:
        """Returns the packages that the distribution has. Raises UserError if a quarter or more is missing."""
        policy = self._run("apt-cache", "policy", *PACKAGES).stdout
        blocks = re.findall(r"^(\S+):\n  Installed: .*\n  Candidate: (.*)$", policy, re.MULTILINE)
        candidates = {name for name, candidate in blocks if candidate != "(none)"}
        known = [name for name in PACKAGES if name in candidates]
        missing = [name for name in PACKAGES if name not in candidates]
        if len(missing) >= _MOST_MISSING * len(PACKAGES):
            raise UserError(
                f"this distribution has {len(known)} of the {len(PACKAGES)} packages; missing are "
                f"{', '.join(missing[:5])}, ... The preset is made for Debian 12 with the component main."
            )
        answer = self._run("apt-get", "download", "--print-uris", *known)
        lines = re.findall(r"^'\S+' ([^\s/]+) \d+ SHA256:([0-9a-f]{64})", answer.stdout, re.MULTILINE)
        by_name = {file.partition("_")[0]: Archive(file.partition("_")[0], file, digest) for file, digest in lines}
        if by_name.keys() != candidates:
            unplaced = min(candidates - by_name.keys(), default="")
            raise UserError(f"apt does not say where to fetch {unplaced} ({_reason(answer)}).")
        return [by_name[name] for name in known]

    def download(self, archive: Archive):
        """Fetches one package. It appears under its name only when it is complete."""
        fetched = self._run("apt-get", "download", archive.name, cwd=self._partial)
        path = self._partial / archive.file
        if fetched.returncode or not path.is_file() or sha256(path) != archive.sha256:
            raise UserError(
                f"cannot fetch the package {archive.name} ({_reason(fetched)}). Check the network and run "
                "the same command again; what is fetched stays."
            )
        path.replace(self._directory / archive.file)

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
    """The gravest complaint of a command, on one line."""
    lines = [line.strip() for line in finished.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("E:", "dpkg-deb: error"))]
    return next(iter(errors or lines), f"exit status {finished.returncode}")


def _language(path: Path) -> str | None:
    # apt writes the underscore of pt_BR as %5f.
    return languages.normalize(urllib.parse.unquote(path.name.rpartition("Translation-")[2]))


def _translated(path: Path, english: dict[str, list[str]]) -> Iterator[catalogs.Entry]:
    language = _language(path)
    for digest, paragraphs in _descriptions(path):
        originals = english.get(digest, [])
        # With another number of paragraphs nobody knows which belongs to which, except the first.
        count = len(originals) if len(originals) == len(paragraphs) else 1
        for original, paragraph in zip(originals[:count], paragraphs):
            yield catalogs.Entry(language, original, paragraph)


def _descriptions(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yields, for each package, the MD5 of its English description and its paragraphs, the one-line summary first."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 (byte {error.start}). Delete it and run again.") from None
    for stanza in text.split("\n\n"):
        fields = _STANZA.search(stanza)
        if fields:
            yield fields["digest"], [fields["summary"], *fields["body"].split(_PARAGRAPH)]
