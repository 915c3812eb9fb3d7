"""Errors of files that training writes, in one line that says what is still safe and what to do."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

from lingvo_moe.errors import UserError
from lingvo_moe.utils import error_numbers

# What to do about a write that failed, by its reason.
_REMEDIES = {
    **dict.fromkeys(map(os.strerror, error_numbers.FULL), "Free disk space"),
    **dict.fromkeys(map(os.strerror, (errno.EACCES, errno.EPERM)), "Give this user the permission to write there"),
    os.strerror(errno.EROFS): "Mount the file system for writing",
}
# Why a file system refuses to write. TensorStore passes the text on as part of a longer message.
_REFUSALS = tuple(map(os.strerror, (*error_numbers.OF_WRITES, errno.EROFS, *error_numbers.DENIED)))


def remedy(reason: str) -> str:
    """Returns what to do, as the beginning of a sentence, about a write that failed for this reason."""
    return next((remedy for known, remedy in _REMEDIES.items() if known in reason), "Remove the cause")


def require_directory(name: str, directory: pathlib.Path, flag: str = "--logdir"):
    """Makes a directory; raises UserError if nothing can be written to it, before hours of work.

    Args:
      name: what the error calls it.
      directory: to make, with its parents, if it is absent.
      flag: that can name another one.
    """
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{name} is a file; expected a directory. Move it away, or pass another {flag}.")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(4096))
    except OSError as error:
        raise UserError(
            f"{name}: nothing can be written there ({error.strerror}). {remedy(str(error.strerror))}, or pass another "
            f"{flag}."
        ) from None


@contextlib.contextmanager
def of_checkpoints(directory: pathlib.Path) -> Iterator[None]:
    """Turns what the file system refuses, as checkpoints are written to `directory`, into a UserError."""
    try:
        yield
    except Exception as error:
        cause = next((refusal for refusal in _REFUSALS if refusal in str(error)), None)
        if cause is None and isinstance(error, OSError):
            cause = error.strerror
        if cause is None and "NOT_FOUND" in str(error):  # TensorStore, of a file that it has just written
            cause = "the files were removed while they were written"
        if cause is None:
            raise
        free = shutil.disk_usage(next(path for path in (directory, *directory.parents) if path.is_dir())).free
        raise UserError(
            f"{directory}: the checkpoint could not be written ({cause}; {free / 2**20:.0f} MiB are free). "
            f"Checkpoints saved before are complete. {remedy(cause)} and run the same command again."
        ) from error
