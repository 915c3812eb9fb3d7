"""Locks on files, which keep processes apart; the operating system releases them however a process ends.

Where a file system has no locks, there is only a warning. `temporary_directories` locks files by itself: it deletes
what it can lock, so there must be a lock, and what cannot be locked stays, which needs no warning.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import pathlib
from collections.abc import Iterator
from typing import IO, Any

_logger = logging.getLogger(__name__)


def lock(file: IO[Any]):
    """Locks an open file for this process alone, until it is closed.

    Raises:
      BlockingIOError: another process has locked it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        warn(file.name, error)


@contextlib.contextmanager
def locked(path: pathlib.Path, waits: bool = True) -> Iterator[int]:
    """Holds a lock file, which is made if there is none; yields a descriptor.

    A process that inherits the descriptor holds the file as well. The file stays, since removing it would let two
    processes lock two files.

    Args:
      path: of the file.
      waits: whether to wait for another process that holds it, with a line in the log.

    Raises:
      BlockingIOError: another process holds the file, and `waits` is false.
    """
    with open(path, "ab") as file:
        try:
            lock(file)
        except BlockingIOError:
            if not waits:
                raise
            _logger.info("waiting for another process that works in %s ...", path.parent)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def warn(path: str | os.PathLike, error: OSError):
    """Logs that a file cannot be locked."""
    _logger.warning(
        "%s cannot be locked (%s). Make sure that no other process does the same work.", path, error.strerror
    )
