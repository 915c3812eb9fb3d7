"""A lock on a log directory: two processes that save there would delete each other's checkpoints, and mix curves."""

from __future__ import annotations

import contextlib
import pathlib
import time
from collections.abc import Iterator
from typing import BinaryIO

from lingvo_moe.errors import UserError
from lingvo_moe.utils import file_lock

LOCK = "lock"
# A process that was killed holds its lock until its memory is released.
_ENDING_SECONDS = 10.0
_POLL_SECONDS = 0.1


@contextlib.contextmanager
def locked(logdir: pathlib.Path, flag: str = "--logdir") -> Iterator[None]:
    """Holds `LOGDIR/lock` for this process alone; the operating system releases it however the process ends.

    The file stays, since removing it would let two processes lock two files. Without an effect, but a warning, where
    it cannot be opened or the file system has no locks.

    Args:
      logdir: the log directory, which exists.
      flag: that names it, for the message.

    Raises:
      UserError: another process holds the lock.
    """
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open(logdir / LOCK, "ab"))
        except OSError as error:  # that of another user, for instance
            file_lock.warn(logdir / LOCK, error)
        else:
            _lock(file, f"{flag}={logdir}")
        yield


def _lock(file: BinaryIO, name: str):
    deadline = time.monotonic() + _ENDING_SECONDS
    while True:
        try:
            file_lock.lock(file)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise UserError(
                    f"{name}: another process trains there. Wait for it, end it, or pass another directory."
                ) from None
            time.sleep(_POLL_SECONDS)
