"""Scalars for TensorBoard."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator, Mapping

from lingvo_moe.errors import UserError
from lingvo_moe.lazy import tf


class SummaryWriter:
    """Writes scalars of one run (`train`, `valid`) under `logdir/NAME`.

    Raises:
      UserError: (from all of its methods) nothing can be written there, or what was written is gone.
    """

    def __init__(self, logdir: str | pathlib.Path, name: str):
        self._directory = pathlib.Path(logdir) / name
        with self._told():
            self._writer = tf.summary.create_file_writer(str(self._directory))

    def write(self, step: int, scalars: Mapping[str, float]):
        """Writes and flushes: what a killed run had reported is there."""
        with self._told():
            with self._writer.as_default(step=step):
                for name, value in scalars.items():
                    tf.summary.scalar(name, value)
            self._writer.flush()
        # A file that was removed can be written to, and nobody will ever read it.
        if not self._directory.is_dir():
            raise UserError(
                f"{self._directory}: the directory has been removed while training wrote its curves there. The same "
                f"command goes on from the newest checkpoint that is left, or begins anew."
            )

    def close(self):
        """Closes the file."""
        with self._told():
            self._writer.close()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Turns what TensorFlow says of the file system into one line."""
        try:
            yield
        except tf.errors.OpError as error:
            reason = (
                str(error).partition("\n")[0].removesuffix(" [Op:CreateSummaryFileWriter] name: ").rpartition("; ")[2]
            )
            raise UserError(
                f"{self._directory}: the curves could not be written ({reason}). Checkpoints saved before are "
                f"complete. Make room and run the same command again."
            ) from error


class NoWriter(SummaryWriter):
    """Writes nothing: that of a process beside the one that writes the curves."""

    def __init__(self):
        pass

    def write(self, step: int, scalars: Mapping[str, float]):
        pass

    def close(self):
        pass
