"""Distinguishes corrupt checkpoints from faults of the machine that reads them."""

from __future__ import annotations

import errno
import os
import pathlib
import re

from lingvo_moe.errors import UserError
from lingvo_moe.utils import error_numbers

# How TensorStore reports that stored bytes cannot be found or decoded; an error of a decoder has no status of its own.
_STORED = ("Error reading", "Error opening", "Error decoding", "DATA_LOSS", "NOT_FOUND")
# By these numbers a file is gone, or something else is in its place. Any other is a failed read, whatever is stored:
# the machine or the file server has too little of something, a disk or a cable fails, a permission is missing.
_CHANGED = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)
_OS_ERROR = re.compile(r" \[os_error_code='(\d+)'\]")  # as TensorStore writes it
# The same, where only its text is known.
_READ_FAILURES = (
    "RESOURCE_EXHAUSTED",
    "PERMISSION_DENIED",
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "CANCELLED",
    "ABORTED",
    *map(os.strerror, (*error_numbers.EXHAUSTED, *error_numbers.DENIED, errno.EIO)),
)
# Where TensorStore found something: the item is the last part of a long path.
_DATABASE = re.compile(r' in OCDBT database at local file ".*?/([^/"]*)/"')
# Characters of a long message: what was read is at its beginning, the file and its error at its end.
_BEGINNING, _END = 90, 160


class CorruptCheckpoint(UserError):
    """A checkpoint is not what was saved; the message says where it differs."""


class UnreadableCheckpoint(UserError):
    """A checkpoint that cannot be read now: an I/O error, a missing permission or too little memory, for instance.

    It may be intact.

    Attributes:
      why: the reason, as part of a line.
    """

    def __init__(self, path: pathlib.Path, why: str):
        """Takes what cannot be read, and the reason."""
        super().__init__(
            f"{path}: the checkpoint cannot be read ({why}); it is not changed, and no other one is used. Run the same "
            f"command again once it can be read, or move the directory of this step away to use the one before."
        )
        self.why = why


class RemovedCheckpoint(UserError):
    """A checkpoint has been removed while it was read, by the training whose log directory it was in."""


def check_there(directory: pathlib.Path):
    """Raises RemovedCheckpoint if the directory of a step is gone; what could not be read in it is then not corrupt."""
    if not directory.is_dir():
        raise removed(directory)


def removed(directory: pathlib.Path) -> RemovedCheckpoint:
    """Returns the error of a step whose directory is gone."""
    return RemovedCheckpoint(
        f"{directory} has been removed; training keeps the newest checkpoints (training.keep). Run the same command "
        f"again."
    )


def is_corruption(error: BaseException) -> bool:
    """Returns whether an error of a read means that stored bytes changed or are gone."""
    return any(phrase in _text(error) for phrase in _STORED) and not is_read_failure(error)


def is_read_failure(error: BaseException) -> bool:
    """Returns whether an error of a read means that the machine, its disk or the file server cannot read now."""
    return any(phrase in _text(error) for phrase in _READ_FAILURES) or not _os_errors(error).issubset(_CHANGED)


def check_read_failure(file: pathlib.Path, error: OSError):
    """Raises UnreadableCheckpoint if an error of a read does not mean that the file of a checkpoint is corrupt."""
    if error.errno not in _CHANGED:
        raise UnreadableCheckpoint(file, str(error.strerror)) from None


def reason(error: BaseException) -> str:
    """Returns an exception of a library, or the one that caused it, as part of a line."""
    cause = _causes(error)[-1]
    first_line = _DATABASE.sub(r" in \1", str(cause).partition("\n")[0]).partition(" [tensorstore_spec=")[0]
    message = _OS_ERROR.sub("", first_line)
    if len(message) > _BEGINNING + _END:
        message = f"{message[:_BEGINNING]} ... {message[-_END:]}"
    return f"{type(cause).__name__}: {message}"


def _os_errors(error: BaseException) -> set[int]:
    """Returns the numbers of the system's errors among an error and its causes."""
    numbers = {each.errno for each in _causes(error) if isinstance(each, OSError) and each.errno is not None}
    return numbers | set(map(int, _OS_ERROR.findall(_text(error))))


def _text(error: BaseException) -> str:
    return "\n".join(map(str, _causes(error)))


def _causes(error: BaseException) -> list[BaseException]:
    """Returns the error, its cause, that one's cause and so on: Orbax hides TensorStore's message in a cause."""
    found = [error]
    while (cause := found[-1].__cause__) is not None:
        found.append(cause)
    return found
