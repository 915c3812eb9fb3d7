"""Scalars for TensorBoard."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

from lingvo_moe.lazy import tf


class SummaryWriter:
    """Writes scalars of one run (`train`, `valid`) under `logdir/NAME`."""

    def __init__(self, logdir: str | pathlib.Path, name: str):
        self._writer = tf.summary.create_file_writer(str(pathlib.Path(logdir) / name))

    def write(self, step: int, scalars: Mapping[str, float]):
        """Writes and flushes: what a killed run had reported is there."""
        with self._writer.as_default(step=step):
            for name, value in scalars.items():
                tf.summary.scalar(name, value)
        self._writer.flush()

    def close(self):
        """Closes the file."""
        self._writer.close()
