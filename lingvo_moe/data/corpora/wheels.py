"""Catalogs of PyPI packages: the presets `pypi` and, for testing alone, `unseen`.

pip downloads the wheels, and only their catalogs are unpacked; a wheel is never installed.

Django alone has 800 different English sentences, too few to learn to translate other sentences. Three large
applications written with Django add ten thousand more, in up to 110 languages.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import zipfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from lingvo_moe.data.corpora import debian, pinned
from lingvo_moe.data.corpora.sources import CatalogDirectory, Source, SourceList, django, register_source
from lingvo_moe.utils import safe_paths

_RULES_VERSION = 1  # of unpacking: increase it with every change of the rules


class Wheel(NamedTuple):
    """A wheel of PyPI, as pip pins it, and the suffix of its catalogs."""

    package: str
    version: str
    sha256: str
    suffix: str = ".mo"


WHEELS = (
    Wheel("weblate", "5.14.3", "0bc2c5a49ebc496758e89f08d5ec9d1b226e8aba2cff7744a18ab9f235dca816"),
    Wheel("pretix", "2026.8.0", "a78932e698778d873530d67f25a57c28d1c09b1bfb1a22ec817c00d90397db85"),
    Wheel("wagtail", "8.0.1", "1e6ad5c7891a54efce1400e168298b5a2cc343b642cee89c31bf5ec30c98b26c"),
)
HOME_ASSISTANT = Wheel(
    "homeassistant", "2025.4.4", "b7970fe3ce3a9d032a3a5dee3cbf71b227e7f23fad14a23855ee252542ef2631", suffix=".json"
)


@register_source("pypi")
def pypi_preset(cache: Path, selected: Collection[str]) -> SourceList:
    """The catalogs of Django and of three applications written with it."""
    return SourceList([django(selected), *fetch(cache, WHEELS, selected)])


@register_source("unseen")
def unseen_preset(cache: Path, selected: Collection[str]) -> SourceList:
    """A game and a home automation: packages that no other preset reads, to test what a model does with other text."""
    game = debian.fetch(cache, ["freeciv-data"], selected)
    return game._replace(sources=[*game.sources, *fetch(cache, [HOME_ASSISTANT], selected)])


def fetch(cache: Path, wheels: Sequence[Wheel], selected: Collection[str] = ()) -> list[Source]:
    """Returns the catalogs of `wheels`, of the selected languages, downloading into `cache` what it lacks.

    Raises:
      UserError: pip cannot download a wheel, the wheel is not the pinned file, or a member of it is unsafe to unpack.
    """
    cache.mkdir(parents=True, exist_ok=True)
    return [CatalogDirectory(wheel.package, _unpacked(cache, wheel), (wheel.suffix,), selected) for wheel in wheels]


def _unpacked(cache: Path, wheel: Wheel) -> Path:
    """Returns the directory of a wheel's catalogs. Its name changes with what decides its content."""
    rules = hashlib.sha256(f"{_RULES_VERSION} {wheel}".encode()).hexdigest()[:12]
    name = f"{wheel.package}-{wheel.version}"
    archive = pinned.PinnedArchive(f"{wheel.package}=={wheel.version}", f"{name}-*.whl", wheel.sha256)

    def fill(directory: Path):
        command = functools.partial(_pip_download, archive)
        _unpack(pinned.fetch(cache, archive, command), wheel.suffix, directory)

    return pinned.complete_directory(cache / f"{name}-{rules}", fill)


def _pip_download(archive: pinned.PinnedArchive, directory: Path) -> list[str]:
    pins = directory / "pins.txt"
    pins.write_text(f"{archive.title} --hash=sha256:{archive.sha256}\n", encoding="utf-8")
    # The wheel is read, not run, so the Python that it needs does not matter.
    options = (
        "--quiet --disable-pip-version-check --no-deps --require-hashes --only-binary=:all: --ignore-requires-python"
    ).split()
    return [sys.executable, "-m", "pip", "download", *options, f"--dest={directory}", f"--requirement={pins}"]


def _unpack(path: Path, suffix: str, directory: Path) -> None:
    """Unpacks the catalogs alone. Raises UserError for a member that leads out of the directory."""
    with zipfile.ZipFile(path) as archive:
        for member in archive.namelist():
            if member.endswith(suffix):
                safe_paths.check_relative_path(member, f"{path}, archive member")
                archive.extract(member, directory)
