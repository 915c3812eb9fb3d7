"""Catalogs of PyPI packages: the presets `pypi` and, for testing alone, `unseen`.

pip downloads the wheels, and only their catalogs are unpacked; a wheel is never installed.

Django alone has 800 different English sentences, too few to learn to translate other sentences. Three large
applications written with Django add ten thousand more, in up to 110 languages.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from lingvo_moe.data import debian
from lingvo_moe.data.sources import (
    CatalogDirectory,
    Source,
    SourceList,
    complete_directory,
    django,
    register_source,
    sha256,
)
from lingvo_moe.errors import UserError
from lingvo_moe.utils import safe_paths

_LOG = logging.getLogger(__name__)


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
    """Returns the directory of a wheel's catalogs."""

    def fill(directory: Path):
        _unpack(_intact(cache, wheel) or _download(cache, wheel), wheel.suffix, directory)

    return complete_directory(cache / f"{wheel.package}-{wheel.version}", fill)


def _download(cache: Path, wheel: Wheel) -> Path:
    _LOG.info("downloading %s %s ...", wheel.package, wheel.version)
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        pins = Path(temporary, "pins.txt")
        pins.write_text(f"{wheel.package}=={wheel.version} --hash=sha256:{wheel.sha256}\n", encoding="utf-8")
        finished = subprocess.run(_pip_download(temporary, pins), capture_output=True, text=True, check=False)
        if finished.returncode:
            reason = (finished.stderr.strip() or finished.stdout.strip() or "no reason given").splitlines()[-1]
            raise UserError(
                f"pip could not download {wheel.package}=={wheel.version}: {reason}\nCheck the network and run the "
                "same command again; completed downloads are kept."
            )
        for path in Path(temporary).glob("*.whl"):
            os.replace(path, cache / path.name)
    downloaded = _intact(cache, wheel)
    if downloaded is None:
        raise UserError(
            f"{cache}: pip downloaded {wheel.package} in a version other than {wheel.version}; empty the directory and "
            "run the same command again."
        )
    return downloaded


def _pip_download(directory: str, pins: Path) -> list[str]:
    # The wheel is read, not run, so the Python that it needs does not matter.
    options = (
        "--quiet --disable-pip-version-check --no-deps --require-hashes --only-binary=:all: --ignore-requires-python"
    ).split()
    return [sys.executable, "-m", "pip", "download", *options, f"--dest={directory}", f"--requirement={pins}"]


def _intact(cache: Path, wheel: Wheel) -> Path | None:
    """Returns the downloaded wheel with the pinned hash, or None."""
    paths = sorted(cache.glob(f"{wheel.package}-{wheel.version}-*.whl"))
    return next((path for path in paths if sha256(path) == wheel.sha256), None)


def _unpack(path: Path, suffix: str, directory: Path) -> None:
    """Unpacks the catalogs alone. Raises UserError for a member that leads out of the directory."""
    with zipfile.ZipFile(path) as archive:
        for member in archive.namelist():
            if member.endswith(suffix):
                safe_paths.check_relative_path(member, f"{path}, archive member")
                archive.extract(member, directory)
