"""Output directories of a command: a directory is replaced as a whole or not at all."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Callable, Iterator

from lingvo_moe.errors import UserError
from lingvo_moe.utils import temporary_directories


def check(flag: str, output: pathlib.Path):
    """Raises UserError if no directory can be made at `output`; call this before hours of work. Makes its parents.

    Args:
      flag: that names the directory, for the error.
      output: an absolute path.
    """
    _require_name(flag, output)
    output = _real(output)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with temporary_directories.make(_prefix(output), output.parent):
            pass
    except OSError as error:
        raise UserError(f"{flag}={output}: cannot be made ({error.strerror}); name another directory.") from None


def check_path(flag: str, path: str | None):
    """Raises UserError if the value of a flag, None for none, is a file, or below one; a directory may be new."""
    if path is None:
        return
    existing = next(each for each in (pathlib.Path(path), *pathlib.Path(path).absolute().parents) if _is_there(each))
    if not existing.is_dir():
        what = "is" if str(existing) == path else f"is below {existing}, which is"
        raise UserError(f"{flag}={path} {what} not a directory; expected the name of a directory, which may be new.")


def check_empty(flag: str, path: str):
    """Raises UserError as `check_path`, and for a directory that has files."""
    check_path(flag, path)
    if os.path.isdir(path) and os.listdir(path):
        raise UserError(f"{flag}={path} is not empty; name a new directory.")


@contextlib.contextmanager
def atomic_directory(output: pathlib.Path, check_files: Callable[[pathlib.Path], None]) -> Iterator[pathlib.Path]:
    """Yields an empty directory, which replaces `output` when the context ends without an error.

    After an interruption at any moment the old or the new directory is complete. If the process is killed between the
    two renames, `recover` restores the old one in the next run.

    Args:
      output: the directory to make or to replace, an absolute path that `check` accepts; its parents are made, too.
      check_files: see `recover`.

    Raises:
      OSError: there cannot be a directory of this name; the old one is where it was.
    """
    output = _real(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    with temporary_directories.make(_prefix(output), output.parent) as complete:
        yield complete
        if output.exists():
            output.rename(_replaced(output))
        try:
            complete.rename(output)
        finally:
            _recover(output, check_files)


def recover(flag: str, output: pathlib.Path, check_files: Callable[[pathlib.Path], None]):
    """Restores a directory whose replacement was interrupted, and removes what killed processes left beside it.

    Args:
      flag: that names the directory, for the error.
      output: the directory, an absolute path.
      check_files: raises UserError for a directory with other files than `output` may have, which is then kept: a
        user's own directory may have the name of a temporary one.

    Raises:
      UserError: of `check_files`, or there can be no directory of this name.
    """
    _require_name(flag, output)
    _recover(_real(output), check_files)


def _recover(output: pathlib.Path, check_files: Callable[[pathlib.Path], None]):
    temporary_directories.remove_abandoned(_prefix(output), output.parent)
    replaced = _replaced(output)
    if not replaced.exists():
        return
    check_files(replaced)
    if output.exists():
        # Of a process that is killed while it deletes, a part is left that may be refused: not under this name.
        with temporary_directories.make(_prefix(output), output.parent) as deleted:
            replaced.rename(deleted / replaced.name)
    else:
        replaced.rename(output)


def _real(output: pathlib.Path) -> pathlib.Path:
    """Returns the path without links: what a link names is replaced, which may be on another disk, not the link."""
    return pathlib.Path(os.path.realpath(output))


def _is_there(path: pathlib.Path) -> bool:
    """Whether there is anything of this name, were it a link to nothing; a name that is too long is an OSError."""
    return path.is_symlink() or path.exists()


def _require_name(flag: str, output: pathlib.Path):
    if not output.name:
        raise UserError(f"{flag}={output}: expected a directory that can be replaced.")


def _prefix(output: pathlib.Path) -> str:
    return f".{output.name}.partial-"


def _replaced(output: pathlib.Path) -> pathlib.Path:
    return output.with_name(f".{output.name}.replaced")
