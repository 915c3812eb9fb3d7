"""Output directories of a command: a directory is replaced as a whole or not at all."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator

from lingvo_moe.utils import temporary_directories


@contextlib.contextmanager
def atomic_directory(output: pathlib.Path, check: Callable[[pathlib.Path], None]) -> Iterator[pathlib.Path]:
    """Yields an empty directory, which replaces `output` when the context ends without an error.

    After an interruption at any moment the old or the new directory is complete. If the process is killed between the
    two renames, `recover` restores the old one in the next run.

    Args:
      output: the directory to make or to replace; its parents are made, too.
      check: see `recover`.

    Raises:
      OSError: there cannot be a directory of this name; the old one is where it was.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    with temporary_directories.make(_prefix(output), output.parent) as complete:
        yield complete
        if output.exists():
            output.rename(_replaced(output))
        try:
            complete.rename(output)
        finally:
            recover(output, check)


def recover(output: pathlib.Path, check: Callable[[pathlib.Path], None]):
    """Restores a directory whose replacement was interrupted, and removes what killed processes left beside it.

    Args:
      output: the directory.
      check: raises UserError for a directory with other files than `output` may have, which is then kept: a user's
        own directory may have the name of a temporary one.
    """
    temporary_directories.remove_abandoned(_prefix(output), output.parent)
    replaced = _replaced(output)
    if not replaced.exists():
        return
    check(replaced)
    if output.exists():
        # Of a process that is killed while it deletes, a part is left that `check` may refuse: not under this name.
        with temporary_directories.make(_prefix(output), output.parent) as deleted:
            replaced.rename(deleted / replaced.name)
    else:
        replaced.rename(output)


def _prefix(output: pathlib.Path) -> str:
    return f".{output.name}.partial-"


def _replaced(output: pathlib.Path) -> pathlib.Path:
    return output.with_name(f".{output.name}.replaced")
