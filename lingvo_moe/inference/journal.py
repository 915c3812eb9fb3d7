"""A file of the translations that a run has made so far, so that the same run continues after them."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import glob
import json
import logging
import os
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from lingvo_moe.errors import UserError
from lingvo_moe.inference.lines.translation import Translation
from lingvo_moe.utils import file_lock, output_files

_logger = logging.getLogger(__name__)
_POLL_SECONDS = 0.01


class Journal:
    """Translations of the first lines of an input; `journal` opens one.

    Attributes:
      lines: the number of lines whose translations it has.
      is_corrupt: whether `read` has found another content.
    """

    def __init__(self, file: BinaryIO, path: pathlib.Path):
        """Counts the lines of a file; a last one that is not complete, of a process that was killed, is cut off."""
        self._file, self._path, self.lines, end = file, path, 0, 0
        self.is_corrupt = False
        file.seek(0)
        for line in file:
            if line.endswith(b"\n"):
                self.lines, end = self.lines + 1, end + len(line)
        file.truncate(end)

    def read(self) -> Iterator[list[Translation]]:
        """Yields the translations of each line that were appended before.

        Raises:
          UserError: the file is corrupt.
        """
        self._file.seek(0)
        for number, line in enumerate(self._file, start=1):
            try:
                (*translations,) = (_translation(*fields) for fields in json.loads(line))
                if not translations:
                    raise ValueError("a line has at least one")
                yield translations
            except (ValueError, TypeError, RecursionError):
                self.is_corrupt = True
                raise UserError(
                    f"{self._path}, line {number}: not translations that an earlier run kept; delete the file."
                ) from None

    def append(self, chunk: Sequence[list[Translation]]):
        """Adds the translations of the next lines, and hands them to the operating system."""
        rows = ([dataclasses.astuple(translation) for translation in translations] for translations in chunk)
        text = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
        with output_files.named_errors(self._path):
            self._file.write(text.encode("utf-8"))
            self._file.flush()
        self.lines += len(chunk)


@contextlib.contextmanager
def journal(output: str | pathlib.Path, run: str) -> Iterator[Journal]:
    """Yields the journal of a run, new or of a part that was interrupted; removes it at the end without an error.

    Args:
      output: the file that the translations are for, beside which the journal is.
      run: hexadecimal digits, as many for all runs, that differ between runs whose translations differ.

    Raises:
      UserError: another process has it open.
    """
    path = _path(output, run)
    _report_others(output, path, len(run))
    # A file whose write has failed is written once more, and fails, when it is closed.
    with output_files.named_errors(path), _open_locked(path) as file:
        opened = Journal(file, path)
        try:
            yield opened
        except BaseException:
            if opened.is_corrupt:
                raise
            if opened.lines:
                _logger.info(
                    "%d lines are translated and kept in %s; the same command continues after them.", opened.lines, path
                )
            else:
                path.unlink(missing_ok=True)
            raise
        path.unlink(missing_ok=True)


def _path(output: str | pathlib.Path, run: str) -> pathlib.Path:
    return pathlib.Path(f"{output}.{run}.partial")


def _report_others(output: str | pathlib.Path, own: pathlib.Path, digits: int):
    """Names the journals of other runs with the same output that no process has open."""
    others = _path(glob.escape(pathlib.Path(output).name), digits * "[0-9a-f]")
    for path in sorted(own.parent.glob(others.name)):  # none where the directory may not be read
        if path != own and not _is_locked(path):
            _logger.info(
                "%s has translations of an interrupted run with other settings, weights or lines, which this one does "
                "not use; delete it if you do not need it.",
                path,
            )


def _is_locked(path: pathlib.Path) -> bool:
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


def _open_locked(path: pathlib.Path) -> BinaryIO:
    """Opens a file for this process alone, and again if another process removed it before it was locked."""
    while True:
        file = open(path, "a+b")  # noqa: SIM115 - the caller closes it
        try:
            file_lock.lock(file)
        except BlockingIOError:
            with file:
                _require_unowned(file, path)
            time.sleep(_POLL_SECONDS)
            continue
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()


def _require_unowned(file: BinaryIO, path: pathlib.Path):
    """Raises UserError if a process has the file for itself; one that begins may share it, see `_is_locked`."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{path}: another process is making the same translations; wait for it, or end it.") from None


def _translation(
    text: str,
    score: float,
    parts: list[list[list[int]]],
    confidence: float,
    truncated: bool = False,
    is_intact: bool = True,
    is_cut: bool = False,
) -> Translation:
    pairs = tuple((tuple(source), tuple(target)) for source, target in parts)
    return Translation(text, score, pairs, confidence, truncated, is_intact, is_cut)
