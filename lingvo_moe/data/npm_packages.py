"""Catalogs of npm packages. `npm pack` downloads the archives; nothing in them is installed or run.

A package's catalogs are unpacked as `FOLDER/LANG.json`, with normalised labels, whatever the package calls them.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from lingvo_moe.data import languages
from lingvo_moe.data.sources import CatalogDirectory, Source, complete_directory, sha256
from lingvo_moe.errors import UserError
from lingvo_moe.utils import safe_paths

_LOG = logging.getLogger(__name__)


class NpmPackage(NamedTuple):
    """A package of the npm registry.

    Attributes:
      name: as npm has it, `@scope/name` for a package with a scope.
      version: exact.
      sha256: of the archive that `npm pack` downloads.
      catalog: a pattern of the archive's members that are catalogs. Its groups are `folder` and `label`.
    """

    name: str
    version: str
    sha256: str
    catalog: str

    @property
    def file_name(self) -> str:
        """The name without a slash, with the version; npm names the archive so."""
        return f"{self.name.removeprefix('@').replace('/', '-')}-{self.version}"


# Scratch: programming for children, with much prose. Element: a messenger. OpenStreetMap: what there is on a map.
# CLDR: the names of emoji.
PACKAGES = (
    NpmPackage(
        "scratch-l10n",
        "6.1.116",
        "15a744a8e86580af23785827785ee045e8d010dc14c87aeebd2a85877ca526d0",
        r"package/(?P<folder>(?:editor|www)/[^/]+)/(?P<label>[\w-]+)\.json",
    ),
    NpmPackage(
        "matrix-react-sdk",
        "3.114.0",
        "f762d12b539b5b092fadf8b1da1ad3295785ed7b62c011947349424935cd9d71",
        r"package/src/i18n/(?P<folder>strings)/(?P<label>[\w-]+)\.json",
    ),
    NpmPackage(
        "@openstreetmap/id-tagging-schema",
        "6.19.2",
        "c8d410007593ce458f7d38381458f20bf73412f7e2c2c075c147a7f916e95555",
        r"package/dist/(?P<folder>translations)/(?P<label>[\w-]+)\.json",
    ),
    NpmPackage(
        "cldr-annotations-full",
        "48.2.0",
        "28576e51225deb51e3ddd734b0f824a0079682cb5d8c27faa9f68149317a14d1",
        r"package/(?P<folder>annotations)/(?P<label>[\w-]+)/annotations\.json",
    ),
)


def fetch(cache: Path, packages: Sequence[NpmPackage], selected: Collection[str] = ()) -> list[Source]:
    """Returns the catalogs of `packages`, of the selected languages, downloading into `cache` what it lacks.

    Raises:
      UserError: npm is absent or cannot download a package, the archive is not the pinned one, or a member of it is
        unsafe to unpack.
    """
    cache.mkdir(parents=True, exist_ok=True)
    return [CatalogDirectory(package.name, _unpacked(cache, package), (".json",), selected) for package in packages]


def _unpacked(cache: Path, package: NpmPackage) -> Path:
    """Returns the directory of a package's catalogs."""

    def fill(directory: Path):
        _unpack(_intact(cache, package) or _download(cache, package), package.catalog, directory)

    return complete_directory(cache / package.file_name, fill)


def _intact(cache: Path, package: NpmPackage) -> Path | None:
    """Returns the downloaded archive with the pinned hash, or None."""
    path = cache / f"{package.file_name}.tgz"
    return path if path.is_file() and sha256(path) == package.sha256 else None


def _download(cache: Path, package: NpmPackage) -> Path:
    pinned = f"{package.name}@{package.version}"
    if shutil.which("npm") is None:
        raise UserError(
            f"this preset needs npm to download {pinned}, and this machine does not have it. Install it "
            "(apt install npm), or use --preset=debian."
        )
    _LOG.info("downloading %s ...", pinned)
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        command = ["npm", "pack", pinned, "--ignore-scripts", "--silent", f"--pack-destination={temporary}"]
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        downloaded = Path(temporary, f"{package.file_name}.tgz")
        if finished.returncode or not downloaded.is_file():
            reason = (finished.stderr.strip() or finished.stdout.strip() or "no reason given").splitlines()[-1]
            raise UserError(
                f"npm could not download {pinned}: {reason}\nCheck the network and run the same command again; "
                "completed downloads are kept."
            )
        if sha256(downloaded) != package.sha256:
            raise UserError(
                f"npm downloaded {pinned} with another content than expected (SHA-256 {sha256(downloaded)}, expected "
                f"{package.sha256}). Check which registry npm uses: npm config get registry."
            )
        os.replace(downloaded, cache / downloaded.name)
    return cache / downloaded.name


def _unpack(path: Path, catalog: str, directory: Path):
    """Writes the catalogs alone. Raises UserError for a member that leads out of the directory."""
    with tarfile.open(path) as archive:
        for member, target in _catalogs(path, archive, catalog):
            content = archive.extractfile(member)
            assert content is not None  # a regular file
            (directory / target).parent.mkdir(parents=True, exist_ok=True)
            (directory / target).write_bytes(content.read())


def _catalogs(path: Path, archive: tarfile.TarFile, catalog: str) -> Iterator[tuple[tarfile.TarInfo, PurePosixPath]]:
    """Yields the catalogs of an archive, regular files alone, and the relative path of each."""
    for member in archive:
        match = re.fullmatch(catalog, member.name)
        label = languages.normalize(match["label"]) if match else None
        if match and label and member.isreg():
            target = f"{match['folder']}/{label}.json"
            yield member, safe_paths.check_relative_path(target, f"{path}, archive member")
