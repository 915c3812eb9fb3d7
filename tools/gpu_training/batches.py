"""Reads the batches of `tools.gpu_training.feed` ahead, onto the device."""

from __future__ import annotations

import itertools
import pathlib
import queue
import threading
import time
from typing import Any

import jax
import numpy as np

from lingvo_moe import tree
from lingvo_moe.data.batching import InputConfig
from lingvo_moe.errors import UserError
from tools.gpu_training import feed

_PATIENCE = 300  # seconds; a feed reads the corpus before its first batch


class Batches:
    """The batches of a feed, in its order: one of each worker, then a second of each."""

    def __init__(self, directory: pathlib.Path, config: InputConfig, shardings: dict):
        """Starts to read ahead in the background."""
        self._directory, self._config, self._shardings = directory, config, shardings
        self._ready: queue.Queue = queue.Queue(feed.AHEAD)
        threading.Thread(target=self._read_ahead, daemon=True).start()

    @property
    def waiting(self) -> int:
        """The number of batches that have been read and not been taken."""
        return self._ready.qsize()

    def next(self) -> tuple[Any, int]:
        """Returns (the batch on the device, the number of its target tokens); waits for it.

        Raises:
          UserError: the feed writes no batch, or a file that is none.
        """
        item = self._ready.get()
        if isinstance(item, Exception):
            raise UserError(f"--feed={self._directory}: {item}.") from item
        return item

    def _read_ahead(self):
        try:
            workers = int(self._wait_for(self._directory / feed.WORKERS).read_text(encoding="utf-8"))
            if workers < 1:
                raise ValueError(f"{feed.WORKERS} says {workers}; start the feed again")
            for number in itertools.count():
                for worker in range(workers):
                    self._ready.put(self._read(feed.path(self._directory, worker, number)))
        except Exception as error:
            self._ready.put(error)

    def _wait_for(self, file: pathlib.Path) -> pathlib.Path:
        deadline = time.monotonic() + _PATIENCE
        while not file.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"no {file.name} within {_PATIENCE} s; start tools.gpu_training.feed with this as its --output"
                )
            time.sleep(0.0005)
        return file

    def _read(self, file: pathlib.Path) -> tuple[Any, int]:
        try:
            batch = feed.unpack(np.load(self._wait_for(file), allow_pickle=False), self._config)
        except (ValueError, EOFError) as error:
            reason = error if isinstance(error, UserError) else "not an array"
            raise ValueError(f"{file.name} is no batch of these programs: {reason}") from None
        file.unlink()
        tokens = int(np.count_nonzero(batch["target"]["segment_ids"]))
        return tree.map_leaves(jax.device_put, batch, self._shardings), tokens
