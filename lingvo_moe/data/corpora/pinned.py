"""Archives that a package manager downloads, pinned by hash, and directories that are complete or absent."""

from __future__ import annotations

import logging
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from lingvo_moe.errors import UserError
from lingvo_moe.utils import temporary_directories
from lingvo_moe.utils.hashes import file_sha256

_logger = logging.getLogger(__name__)
# Lines of npm and pip that are not the reason, such as `npm error code E404`.
_NO_REASON = re.compile(r"npm error (?:code|syscall|errno|A complete log)\b|npm warn|WARNING:")


class PinnedArchive(NamedTuple):
    """An archive of a registry.

    Attributes:
      title: package and version, as the package manager takes them.
      pattern: of the file's name, in the syntax of `glob`.
      sha256: of the file.
    """

    title: str
    pattern: str
    sha256: str


def fetch(cache: Path, archive: PinnedArchive, command: Callable[[Path], list[str]]) -> Path:
    """Returns the path of an archive in `cache`, downloading it if it is not there with its hash.

    Args:
      cache: the download cache; exists.
      archive: what to download.
      command: returns the package manager's command that downloads it into an empty directory.

    Raises:
      UserError: the command fails, or what it downloads is another file; the message has the command's reason.
    """
    intact = _intact(cache, archive)
    if intact:
        return intact
    _logger.info("downloading %s ...", archive.title)
    with temporary_directories.make("download-", cache) as temporary:
        words = command(temporary)
        finished = subprocess.run(words, capture_output=True, text=True, check=False)
        downloaded = sorted(temporary.glob(archive.pattern))
        if finished.returncode or not downloaded:
            raise UserError(
                f"{_name(words)} could not download {archive.title}: {_reason(finished)}\nCheck the network and run "
                "the same command again; completed downloads are kept."
            )
        intact = _intact(temporary, archive)
        if intact is None:
            raise UserError(
                f"{_name(words)} downloaded {archive.title} with another content than expected (SHA-256 "
                f"{file_sha256(downloaded[0])}, expected {archive.sha256}). Check which registry it uses."
            )
        os.replace(intact, cache / intact.name)
    return cache / intact.name


def complete_directory(path: Path, fill: Callable[[Path], None]) -> Path:
    """Returns the directory `path`, which exists only when it is complete, whatever other processes do.

    Args:
      path: of the directory.
      fill: called if there is none yet, with an empty directory to write into.
    """
    if not path.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary_directories.make(f"{path.name}.partial-", path.parent) as partial:
            fill(partial)
            try:
                os.replace(partial, path)
            except OSError:
                if not path.is_dir():  # another process was first
                    raise
    return path


def _intact(directory: Path, archive: PinnedArchive) -> Path | None:
    """Returns the archive in `directory` with the pinned hash, or None."""
    return next((path for path in sorted(directory.glob(archive.pattern)) if file_sha256(path) == archive.sha256), None)


def _name(command: list[str]) -> str:
    """Returns the package manager's name: `pip` is run as `python -m pip`."""
    return command[2] if command[1] == "-m" else command[0]


def _reason(finished: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in f"{finished.stderr}\n{finished.stdout}".splitlines() if line.strip()]
    reasons = [line for line in lines if not _NO_REASON.match(line)]
    errors = [line for line in reasons if line.startswith(("ERROR:", "npm error"))]
    return next(iter([*errors, *reasons]), f"exit status {finished.returncode}")
