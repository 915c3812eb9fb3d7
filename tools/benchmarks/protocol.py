"""How a worker process and the benchmark talk: a line of JSON each way. Standard library alone, so that peers can use it.

    python -m MODULE WORK        WORK is JSON; `start(work)` makes ready
    -> {"facts": {...}}          what was made: weights, tokens, experts, versions
    <- {"run": 3}                three times the work
    -> {"seconds": 1.2, "losses": [9.1, 9.0, 8.9]}

Seconds are the CPU time of the whole process, all its threads together, so that what else the machine does counts little. The
worker has one core to itself, as far as other processes leave it, and ends with its standard input.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import zlib
from collections.abc import Callable, Sequence

# (facts by name, a function that does the work so many times and returns the losses)
Started = tuple[dict, Callable[[int], list[float]]]


def serve(start: Callable[[dict], Started], arguments: Sequence[str]):
    """Does what the other side asks for until it closes our standard input.

    Args:
      start: from the work to what the worker knows of it and the function that does it once more, warmed up.
      arguments: the process's own: the work as JSON.
    """
    # One core before a library looks how many there are; and what a library prints must not stand between our lines.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout.reconfigure(line_buffering=True)  # so that it is in the log even if the process is killed
    facts, run = start(json.loads(arguments[0]))
    _send(channel, {"facts": facts})
    for line in sys.stdin:
        times = json.loads(line)["run"]
        begin = time.process_time()
        losses = run(times)
        _send(channel, {"seconds": time.process_time() - begin, "losses": [float(loss) for loss in losses]})


def token_ids(work: dict) -> dict[str, list[list[int]]]:
    """The same batch for everyone: `source` ids, the decoder's `inputs`, and the `labels`, which are the inputs shifted by one.

    No id is below 4, where padding and the other special tokens are.
    """
    draw = random.Random(work["seed"])
    rows, length = work["rows"], work["length"]

    def matrix(columns: int) -> list[list[int]]:
        return [[draw.randrange(4, work["vocabulary"]) for _ in range(columns)] for _ in range(rows)]

    source, target = matrix(length), matrix(length + 1)
    return {"source": source, "inputs": [row[:-1] for row in target], "labels": [row[1:] for row in target]}


def numbers(work: dict) -> list[float]:
    """The same activations for everyone: a layer's input, tokens times model_dim numbers of unit variance, row by row."""
    draw = random.Random(work["seed"])
    return [draw.gauss(0.0, 1.0) for _ in range(work["rows"] * work["length"] * work["model_dim"])]


def digest(values: object) -> str:
    """A short fingerprint of numbers, by which two workers show that they have the same."""
    return f"{zlib.crc32(json.dumps(values).encode()):08x}"


def _send(channel, message: dict):
    channel.write(json.dumps(message) + "\n")
    channel.flush()
