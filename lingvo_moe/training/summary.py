"""Scalars for TensorBoard."""

from __future__ import annotations

import contextlib
import pathlib
import re
from collections.abc import Iterator, Mapping

from lingvo_moe.errors import UserError
from lingvo_moe.lazy import tf
from lingvo_moe.training import disk_errors

_PREFIX = re.compile(r"^\{\{function_node .*?\}\} ")  # of the messages of TensorFlow's operations


class SummaryWriter:
    """Writes scalars of one run (`train`, `valid`) under `logdir/NAME`.

    Raises:
      UserError: (from all methods) nothing can be written there, or the directory has been removed.
    """

    def __init__(self, logdir: str | pathlib.Path, name: str):
        self._directory = pathlib.Path(logdir) / name
        with self._disk_errors():
            self._writer = tf.summary.create_file_writer(str(self._directory))

    def write(self, step: int, scalars: Mapping[str, float]):
        """Writes and flushes, so that the curves of a killed run are complete."""
        with self._disk_errors():
            with self._writer.as_default(step=step):
                for name, value in scalars.items():
                    tf.summary.scalar(name, value)
            self._writer.flush()
        # A removed file can still be written to, but never read.
        if not self._directory.is_dir():
            raise UserError(
                f"{self._directory}: the directory has been removed while training wrote its curves there. The same "
                f"command resumes from the newest checkpoint that is left, or starts from the first step."
            )

    def close(self):
        """Closes the file."""
        with self._disk_errors():
            self._writer.close()

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        """Turns TensorFlow's errors of the file system into one line."""
        try:
            yield
        except tf.errors.OpError as error:
            first_line = _PREFIX.sub("", str(error)).partition("\n")[0]
            reason = first_line.removesuffix(" [Op:CreateSummaryFileWriter] name: ").rpartition("; ")[2]
            raise UserError(
                f"{self._directory}: the curves could not be written ({reason}). Checkpoints saved before are "
                f"complete. {disk_errors.remedy(reason)} and run the same command again."
            ) from error


class NoWriter(SummaryWriter):
    """Writes nothing: for processes other than the primary one."""

    def __init__(self):
        pass

    def write(self, step: int, scalars: Mapping[str, float]):
        """Does nothing."""

    def close(self):
        """Does nothing."""
