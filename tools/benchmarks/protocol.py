"""The protocol of a worker process: a line of JSON each way. It needs the standard library alone, for the peers.

    python -m MODULE WORK        WORK is JSON; `start(work)` prepares it
    -> {"facts": {...}}          weights, tokens, experts, versions
    <- {"run": 3}                do the work three times
    -> {"seconds": 1.2, "losses": [9.1, 9.0, 8.9]}

Seconds are the CPU time of the whole process with all its threads, so that other processes matter little. The worker is
pinned to one core and ends with its standard input.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import time
import zlib
from collections.abc import Callable, Sequence

# (facts by name, a function that does the work a number of times and returns the losses)
Started = tuple[dict, Callable[[int], list[float]]]


def serve(start: Callable[[dict], Started], arguments: Sequence[str]):
    """Serves requests until standard input is closed.

    Args:
      start: maps the work to its facts and a warmed-up function that does it.
      arguments: arguments of the process: the work as JSON.
    """
    work = _work(arguments)
    # One core, before a library counts the cores; libraries print to standard error, as standard output is the channel.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout = open(sys.stdout.fileno(), "w", buffering=1, closefd=False)  # noqa: SIM115  (complete logs after a kill)
    facts, run = start(work)
    _send(channel, {"facts": facts})
    for line in sys.stdin:
        times = json.loads(line)["run"]
        begin = time.process_time()
        losses = run(times)
        _send(channel, {"seconds": time.process_time() - begin, "losses": [float(loss) for loss in losses]})


def _work(arguments: Sequence[str]) -> dict:
    """Returns the work; ends the process with one line for another argument, such as --help."""
    with contextlib.suppress(ValueError, RecursionError):
        (text,) = arguments
        if isinstance(work := json.loads(text), dict):
            return work
    print("error: expected the work as JSON; `python -m tools.benchmarks` starts this worker.", file=sys.stderr)
    sys.exit(2)


def token_ids(work: dict) -> dict[str, list[list[int]]]:
    """Returns the batch of all workers: `source` ids, the decoder's `inputs`, and `labels`, the inputs shifted by one.

    Ids start at 4, after padding and the other special tokens.
    """
    draw = random.Random(work["seed"])
    rows, length = work["rows"], work["length"]

    def matrix(columns: int) -> list[list[int]]:
        return [[draw.randrange(4, work["vocabulary"]) for _ in range(columns)] for _ in range(rows)]

    source, target = matrix(length), matrix(length + 1)
    return {"source": source, "inputs": [row[:-1] for row in target], "labels": [row[1:] for row in target]}


def numbers(work: dict) -> list[float]:
    """Returns the layer input of all workers: tokens times model_dim numbers of unit variance, row by row."""
    draw = random.Random(work["seed"])
    return [draw.gauss(0.0, 1.0) for _ in range(work["rows"] * work["length"] * work["model_dim"])]


def rate_factor(step: int, steps: int) -> float:
    """Returns the learning rate of a step over the largest one: it rises, then falls on a straight line to a tenth.

    m4.Quickstart had this schedule when it was chosen. The first tenth of the steps is the warm-up, the last rate is
    that of the last tenth.

    Args:
      step: the number of steps before this one.
      steps: of the whole training, at least 10.
    """
    count, warmup = step + 1, steps // 10
    falling = (steps - warmup) * 9 // 10
    left = (warmup + falling - count) / falling
    return min(1.0, count / warmup) * (0.1 + 0.9 * min(max(left, 0.0), 1.0))


def digest(values: object) -> str:
    """Returns a short fingerprint, by which two workers show that they have the same numbers."""
    return f"{zlib.crc32(json.dumps(values).encode()):08x}"


def _send(channel, message: dict):
    channel.write(json.dumps(message) + "\n")
    channel.flush()
