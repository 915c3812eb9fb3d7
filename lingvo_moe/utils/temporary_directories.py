"""Temporary directories of one process; those of processes that were killed are removed by the next one."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import pathlib
import shutil
import tempfile
import time
from collections.abc import Iterator

_LOCK, _CONTENTS = "lock", "contents"
_YOUNG = 60  # seconds; a directory that is younger may not be locked yet


@contextlib.contextmanager
def make(prefix: str, parent: pathlib.Path | None = None) -> Iterator[pathlib.Path]:
    """Yields an empty directory of this process alone, and removes it at the end, unless it has been renamed.

    It has the permissions of any new directory. It is inside of a directory PREFIX*, which has a locked file as well:
    directories of the same prefix whose process was killed are not locked any more, and are removed first.

    Args:
      prefix: of the name.
      parent: where to make it; by default the system's temporary directory.

    Raises:
      OSError: no directory can be made there.
    """
    parent = parent or pathlib.Path(tempfile.gettempdir())
    remove_abandoned(prefix, parent)
    # After Ctrl-C threads may still write there, which must not hide the interruption.
    with (
        tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True) as directory,
        open(pathlib.Path(directory, _LOCK), "wb") as lock,
    ):
        with contextlib.suppress(OSError):  # a file system without locks, where nothing is removed for others
            fcntl.flock(lock, fcntl.LOCK_EX)
        contents = pathlib.Path(directory, _CONTENTS)
        contents.mkdir()
        try:
            yield contents
        finally:
            shutil.rmtree(contents, ignore_errors=True)  # before the lock: a kill in between leaves both


def remove_abandoned(prefix: str, parent: pathlib.Path):
    """Removes what `make` made for processes that were killed; of others, the lock is held."""
    for directory in parent.glob(f"{glob.escape(prefix)}*"):
        with contextlib.suppress(OSError):  # of another user, without a lock, or removed meanwhile
            if time.time() - directory.stat().st_mtime < _YOUNG:
                continue
            with open(directory / _LOCK, "r+b") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory / _CONTENTS, ignore_errors=True)
                shutil.rmtree(directory)
