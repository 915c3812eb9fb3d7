"""Makes training batches on many cores, without TensorFlow: `tools.gpu_training.run` reads them.

    python -m tools.gpu_training.feed build/gpu_training --corpus=DIR --tokenizers=DIR --output=/dev/shm/feed
        [--workers=14] [--seed=0]

Worker i of W packs the examples n with n % W == i (shard i, see `data.pipeline`). Its batch n is the file `i_n.npy` of
the output, a new directory that should be in memory: `[B, columns] int32`, the arrays of the batch side by side. A
worker waits while its last `AHEAD` files have not been taken. `workers` is a file with the number W.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import pathlib
import signal
import sys
import time
from multiprocessing import connection

import numpy as np

from lingvo_moe.data.batching import FIELDS, Batch, InputConfig
from lingvo_moe.data.pipeline import TrainInput
from lingvo_moe.data.tokenizer import Tokenizers
from lingvo_moe.errors import UserError
from lingvo_moe.utils import output_files
from lingvo_moe.utils.exit_status import INTERRUPTED
from tools.gpu_training import count, read_facts, seed

AHEAD = 6  # batches
WORKERS = "workers"


def main(arguments: list[str] | None = None) -> int:
    """Feeds until it is stopped; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpu_training.feed", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("directory", type=pathlib.Path, help="directory that tools.gpu_training.make wrote")
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--tokenizers", required=True)
    parser.add_argument("--output", type=pathlib.Path, required=True, help="a new directory for the batches")
    parser.add_argument("--workers", type=count, default=14, help="processes")
    parser.add_argument("--seed", type=seed, help="of the order of the examples; by default input.seed")
    given = parser.parse_args(arguments)
    try:
        facts = read_facts(given.directory)
        Tokenizers.load_for(facts.vocabularies, given.tokenizers)
        config = facts.config if given.seed is None else dataclasses.replace(facts.config, seed=given.seed)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        feed(given.corpus, given.tokenizers, config, given.workers, given.output)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    print("error: a worker has ended; start the feed again, with a new --output.", file=sys.stderr)
    return 1


def feed(corpus: str, tokenizers: str, config: InputConfig, workers: int, directory: pathlib.Path):
    """Writes batches of `config.batch_size` rows until a worker ends, which it only does with an error.

    Raises:
      UserError: corpus or tokenizers cannot be read, or the directory exists or cannot be written to.
    """
    shards = dataclasses.replace(config, batch_size=config.batch_size * workers, shards=workers)
    train_input = TrainInput(corpus, tokenizers, shards, in_graph=False)
    try:
        directory.mkdir(parents=True)
        with output_files.atomic_path(directory / WORKERS) as partial:
            partial.write_text(f"{workers}\n", encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"--output={directory}: expected a new directory, for batches of this feed alone ({error.strerror})."
        ) from None
    context = multiprocessing.get_context("fork")  # the corpus is in memory once
    processes = [
        context.Process(target=_work, args=(train_input, worker, directory), daemon=True) for worker in range(workers)
    ]
    try:
        for process in processes:
            process.start()
        connection.wait([process.sentinel for process in processes])
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()


def path(directory: pathlib.Path, worker: int, number: int) -> pathlib.Path:
    """Returns the file of a batch."""
    return directory / f"{worker}_{number}.npy"


def unpack(rows: np.ndarray, config: InputConfig) -> Batch:
    """Returns the batch of a file's `[B, columns] int32`; raises UserError for an array of another form."""
    expected = (config.batch_size, sum(len(FIELDS[side]) * length for side, length in config.lengths.items()))
    if rows.shape != expected or rows.dtype != np.int32:
        raise UserError(f"an array of {rows.dtype} {list(rows.shape)}; expected int32 {list(expected)}")
    columns = [(side, name, length) for side, length in config.lengths.items() for name in FIELDS[side]]
    ends = np.cumsum([length for _, _, length in columns])
    batch: Batch = {side: {} for side in config.lengths}
    for (side, name, _), array in zip(columns, np.split(rows, ends[:-1], axis=1), strict=True):
        batch[side][name] = np.ascontiguousarray(array)
    return batch


def _work(train_input: TrainInput, worker: int, directory: pathlib.Path):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the feed ends its workers
    feed_process = os.getppid()
    for number, (batch, _) in enumerate(train_input.batches(shards=range(worker, worker + 1))):
        while number >= AHEAD and path(directory, worker, number - AHEAD).exists():
            if os.getppid() != feed_process:  # it was killed
                return
            time.sleep(0.002)
        partial = directory / f"{worker}.partial"
        with open(partial, "wb") as file:
            np.save(file, np.concatenate([array for side in batch.values() for array in side.values()], axis=1))
        os.replace(partial, path(directory, worker, number))


if __name__ == "__main__":
    sys.exit(main())
