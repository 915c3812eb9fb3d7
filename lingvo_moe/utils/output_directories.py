"""Output directories of a command: a directory is replaced as a whole or not at all."""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Callable


def replace(output: pathlib.Path, complete: pathlib.Path, check: Callable[[pathlib.Path], None]):
    """Renames `complete` to `output`, in place of a directory that may be there.

    After an interruption at any moment the old or the new directory is complete. If the process is killed between the
    two renames, `recover` restores the old one in the next run.

    Args:
      output: the directory to make or to replace.
      complete: what takes its place; on the same file system.
      check: see `recover`.

    Raises:
      OSError: `complete` cannot be renamed; the old directory is where it was.
    """
    if output.exists():
        output.rename(_replaced(output))
    try:
        complete.rename(output)
    finally:
        recover(output, check)


def recover(output: pathlib.Path, check: Callable[[pathlib.Path], None]):
    """Restores a directory whose replacement was interrupted, and removes one that has been replaced.

    Args:
      output: the directory.
      check: raises UserError for a directory with other files than `output` may have, which is then kept: a user's
        own directory may have the name of a temporary one.
    """
    replaced = _replaced(output)
    if not replaced.exists():
        return
    check(replaced)
    if output.exists():
        shutil.rmtree(replaced)
    else:
        replaced.rename(output)


def _replaced(output: pathlib.Path) -> pathlib.Path:
    return output.with_name(f".{output.name}.replaced")
