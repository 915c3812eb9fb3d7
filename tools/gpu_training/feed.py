"""Makes training batches on many cores, without TensorFlow: `tools.gpu_training.run` reads them.

Worker i of W packs the examples n with n % W == i. Batch n of a worker is the file WORKER_N.npy in a directory, which
should be in memory (/dev/shm): `[B, columns] int32`, the arrays of the batch side by side. A worker waits while its
last `_AHEAD` files have not been taken.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import pathlib
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lingvo_moe import tree
from lingvo_moe.data.batching import FIELDS, Batch, Example, InputConfig, pack
from lingvo_moe.data.corpus_stream import TrainPairs
from tools.gpu_training import FACTS

_AHEAD = 6  # batches
_CHUNK = 256  # examples


def feed(corpus: str, tokenizers: str, config: InputConfig, workers: int, directory: pathlib.Path):
    """Writes batches endlessly; never returns."""
    pairs = TrainPairs(corpus, tokenizers, config)
    directory.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("fork")  # the corpus is in memory once
    processes = [
        context.Process(target=_work, args=(pairs, config, worker, workers, directory), daemon=True)
        for worker in range(workers)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


class Feeds:
    """Batches of several directories, on the device: of the last one that has some, else of the one before.

    Attributes:
      current: the directory of the last batch that was read.
    """

    def __init__(self, directories: Sequence[str], workers: int, config: InputConfig, shardings: dict):
        """Starts to read ahead in the background."""
        self._taken = dict.fromkeys(directories, 0)
        self._workers, self._config, self._shardings = workers, config, shardings
        self._batches: queue.Queue = queue.Queue(_AHEAD)
        self.current = ""
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def waiting(self) -> int:
        """The number of batches that have been read and not been taken."""
        return self._batches.qsize()

    def next(self) -> tuple[Any, int]:
        """Returns (batch on the device, the number of its target tokens); waits for it."""
        return self._batches.get()

    def _read(self):
        import jax

        for file in self._files():
            batch = unpack(np.load(file), self._config)
            file.unlink()
            tokens = int(np.count_nonzero(batch["target"]["segment_ids"]))
            self._batches.put((tree.map_leaves(jax.device_put, batch, self._shardings), tokens))

    def _files(self) -> Iterator[pathlib.Path]:
        while True:
            for name, taken in reversed(self._taken.items()):
                number, worker = divmod(taken, self._workers)
                file = path(pathlib.Path(name), worker, number)
                if file.exists():
                    self._taken[name], self.current = taken + 1, name
                    yield file
                    break
            else:
                time.sleep(0.0005)


def path(directory: pathlib.Path, worker: int, number: int) -> pathlib.Path:
    """Returns the file of a batch."""
    return directory / f"{worker}_{number}.npy"


def unpack(rows: np.ndarray, config: InputConfig) -> Batch:
    """Returns the batch of a file's `[B, columns]`."""
    batch: Batch = {}
    start = 0
    for side, length in config.lengths.items():
        batch[side] = {}
        for name in FIELDS[side]:
            batch[side][name] = np.ascontiguousarray(rows[:, start : start + length])
            start += length
    return batch


def _work(pairs: TrainPairs, config: InputConfig, worker: int, workers: int, directory: pathlib.Path):
    batches = pack(_examples(pairs, config, worker, workers), config, config.batch_size)
    for number, (batch, _) in enumerate(batches):
        while number >= _AHEAD and path(directory, worker, number - _AHEAD).exists():
            time.sleep(0.002)
        rows = np.concatenate([array for side in config.lengths for array in batch[side].values()], axis=1)
        partial = directory / f"{worker}.partial"
        with open(partial, "wb") as file:
            np.save(file, rows)
        os.replace(partial, path(directory, worker, number))


def _examples(pairs: TrainPairs, config: InputConfig, worker: int, workers: int) -> Iterator[Example]:
    for start in itertools.count(worker, workers * _CHUNK):
        indices = np.arange(start, start + workers * _CHUNK, workers)
        yield from (example for example in pairs.examples_at(indices) if config.fits(example))


def main():
    """Feeds batches of the shape that the programs of a directory take."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--tokenizers", required=True)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    config = InputConfig(**{**json.loads((given.directory / FACTS).read_text())["input"], "seed": given.seed})
    feed(given.corpus, given.tokenizers, config, given.workers, given.output)


if __name__ == "__main__":
    main()
