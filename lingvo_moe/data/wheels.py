"""Catalogs of PyPI packages: wheels are downloaded by pip, checked by their hash, and only their catalogs are unpacked.

Django alone has 800 different English sentences, too few to learn to translate a sentence that is not among them. Three large
applications written with Django bring ten thousand more, in up to 110 languages.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from lingvo_moe.data.sources import Folder, Source, sha256
from lingvo_moe.errors import UserError


class Wheel(NamedTuple):
    """A wheel of PyPI, named as pip pins it."""

    package: str
    version: str
    sha256: str


WHEELS = (
    Wheel("weblate", "5.14.3", "0bc2c5a49ebc496758e89f08d5ec9d1b226e8aba2cff7744a18ab9f235dca816"),
    Wheel("pretix", "2026.8.0", "a78932e698778d873530d67f25a57c28d1c09b1bfb1a22ec817c00d90397db85"),
    Wheel("wagtail", "8.0.1", "1e6ad5c7891a54efce1400e168298b5a2cc343b642cee89c31bf5ec30c98b26c"),
)


def fetch(directory: Path, wheels: tuple[Wheel, ...] = WHEELS) -> list[Source]:
    """Returns the catalogs of `wheels`, downloading into `directory` what is not there, whole, from before.

    Raises:
      UserError: pip cannot download a wheel, or what it brought is not the pinned file.
    """
    directory.mkdir(parents=True, exist_ok=True)
    return [Folder(wheel.package, _catalogs(directory, wheel), suffixes=(".mo",)) for wheel in wheels]


def _catalogs(directory: Path, wheel: Wheel) -> Path:
    """The directory of a wheel's catalogs; it exists only when it is complete."""
    unpacked = directory / f"{wheel.package}-{wheel.version}"
    if not unpacked.is_dir():
        partial = unpacked.with_name(f"{unpacked.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        _unpack(_download(directory, wheel), partial)
        os.replace(partial, unpacked)
    return unpacked


def _download(directory: Path, wheel: Wheel) -> Path:
    found = _intact(directory, wheel)
    if found is None:
        print(f"downloading {wheel.package} {wheel.version} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=directory) as temporary:
            pins = Path(temporary, "pins.txt")
            pins.write_text(f"{wheel.package}=={wheel.version} --hash=sha256:{wheel.sha256}\n", encoding="utf-8")
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--disable-pip-version-check",
                "--no-deps",
                "--only-binary=:all:",
                "--require-hashes",
                f"--dest={temporary}",
                f"--requirement={pins}",
            ]
            finished = subprocess.run(command, capture_output=True, text=True, check=False)
            if finished.returncode:
                said = (finished.stderr.strip() or finished.stdout.strip() or "no reason given").splitlines()[-1]
                raise UserError(
                    f"pip could not download {wheel.package}=={wheel.version}: {said}\nCheck the network and run the "
                    "same command again; what was fetched before is kept."
                )
            for path in Path(temporary).glob("*.whl"):
                os.replace(path, directory / path.name)
        found = _intact(directory, wheel)
    if found is None:
        raise UserError(
            f"{directory}: pip brought another {wheel.package} than version {wheel.version}; empty the directory and "
            "run the same command again."
        )
    return found


def _intact(directory: Path, wheel: Wheel) -> Path | None:
    return next(
        (
            path
            for path in sorted(directory.glob(f"{wheel.package}-{wheel.version}-*.whl"))
            if sha256(path) == wheel.sha256
        ),
        None,
    )


def _unpack(path: Path, directory: Path) -> None:
    """Unpacks the catalogs alone; a member whose name leads out of the directory is refused."""
    with zipfile.ZipFile(path) as archive:
        for member in archive.namelist():
            if not member.endswith(".mo"):
                continue
            name = PurePosixPath(member)
            if name.is_absolute() or ".." in name.parts:
                raise UserError(
                    f"{path}: member {member!r} leads out of the archive; the file is not what it should be."
                )
            archive.extract(member, directory)
