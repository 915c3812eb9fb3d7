"""From sentence pairs of any length to batches of one shape: several pairs to a row, little padding.

A batch is a nested dict of int32 arrays,

    {"source": {"ids", "segment_ids", "positions"},            each [B, S]
     "target": {"ids", "labels", "segment_ids", "positions"}}  each [B, T]

Source ids end with eos; target ids (the decoder's input) begin with bos, labels end with eos. The pairs of a row are
its segments 1, 2, ...; segment 0 is padding. Positions restart at 0 in each segment. Attention stays within a segment.
A language model's batch has no source.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from lingvo_moe.data.tokenizer import SPECIAL_IDS
from lingvo_moe.errors import UserError
from lingvo_moe.sharding.layout import DeviceMesh, Spec

Batch = dict[str, dict[str, np.ndarray]]
FIELDS = {"source": ("ids", "segment_ids", "positions"), "target": ("ids", "labels", "segment_ids", "positions")}
_LENGTH_LETTERS = {"source": "S", "target": "T"}
_CORES_PER_HOST = 8  # of a TPU v3


@dataclasses.dataclass(frozen=True)
class InputConfig:
    """What a training or evaluation batch looks like.

    Attributes:
      batch_size: B, the rows of a batch over all processes.
      source_length: S, the tokens of a source row, each sentence's eos included; 0 for a language model, which reads
        targets alone.
      target_length: T, the tokens of a target row, each sentence's bos (or, in the labels, eos) included. There is
        least padding where T : S is target tokens : source tokens of the corpus; in the quickstart corpus, 1 : 2.
      temperature: of the mixture of languages: 1 as in the corpus, 5 as in M4, inf all equal.
      packing: whether a row may hold several pairs. Without it a row is one pair.
      lookahead: packing closes a batch when this many pairs have found no room; they open the next one. A larger value
        pads less. 1 is plain first-fit in stream order.
      seed: of the order of the training stream.
      shards: the rows of a training batch are packed in so many independent parts, or as many fewer as it takes to
        divide batch_size; at most so many processes can share the work. What is in a batch depends on this number,
        never on that of processes. Eight pad 0.3 % more of the positions than one (quickstart corpus, all small
        models).

    Raises:
      UserError: a value that makes no batch.
    """

    batch_size: int = 32
    source_length: int = 96
    target_length: int = 48
    temperature: float = 5.0
    packing: bool = True
    lookahead: int = 16
    seed: int = 0
    shards: int = 8

    def __post_init__(self):
        least = {
            "batch_size": 1,
            "source_length": 2 if self.source_length else 0,
            "target_length": 2,
            "lookahead": 1,
            "seed": 0,
            "shards": 1,
        }
        for name, value in least.items():
            if getattr(self, name) < value:
                raise UserError(f"input.{name}={getattr(self, name)}: expected at least {value}.")

    @property
    def lengths(self) -> dict[str, int]:
        """The tokens of a row, by side."""
        lengths = {"source": self.source_length, "target": self.target_length}
        return {side: length for side, length in lengths.items() if length}

    @property
    def tokens(self) -> int:
        """The tokens of a batch, of all sides together."""
        return self.batch_size * sum(self.lengths.values())

    @property
    def num_shards(self) -> int:
        """The independent parts of a training batch: the largest number up to `shards` that divides `batch_size`."""
        return next(number for number in range(self.shards, 0, -1) if self.batch_size % number == 0)

    @property
    def shard_rows(self) -> int:
        """The rows of each of them: shard i has rows `i * shard_rows` and following."""
        return self.batch_size // self.num_shards

    def shards_of(self, rows: range) -> range:
        """Returns the shards that make up these rows of a batch; raises UserError if they are not a whole number."""
        if rows.start % self.shard_rows or rows.stop % self.shard_rows:
            fitting = self.batch_size // math.gcd(self.batch_size, rows.start, rows.stop)
            raise UserError(
                f"this process feeds rows {rows.start} to {rows.stop - 1} of a batch, which are not whole parts of "
                f"the {self.num_shards} that it is packed in. Pass --set input.shards={fitting} and begin in another "
                f"--logdir, or take fewer processes."
            )
        return range(rows.start // self.shard_rows, rows.stop // self.shard_rows)


def shards_for(mesh: DeviceMesh) -> int:
    """`InputConfig.shards` that let each host of a TPU slice feed the rows of its own cores, which the first axis cuts."""
    return max(InputConfig.shards, min(mesh.shape[0], mesh.size // _CORES_PER_HOST))


def input_specs(config: InputConfig) -> dict[str, dict[str, Spec]]:
    """Returns the Spec of each array of a (global) batch, nested as the batch is."""
    return {
        side: dict.fromkeys(FIELDS[side], Spec((config.batch_size, length), "int32", f"B{_LENGTH_LETTERS[side]}"))
        for side, length in config.lengths.items()
    }


class Example(NamedTuple):
    """A tokenised sentence pair.

    Attributes:
      number: its place in the stream.
      source: `[source tokens] int32`, without eos; empty for a language model.
      target: `[target tokens] int32`, without bos and eos.
    """

    number: int
    source: np.ndarray
    target: np.ndarray

    def fits(self, config: InputConfig) -> bool:
        """Whether the pair, eos included, fits an empty row."""
        return all(len(getattr(self, side)) < length for side, length in config.lengths.items())


class Rows:
    """A batch being filled: first-fit, with at most `capacity` pairs a row."""

    def __init__(self, config: InputConfig, rows: int):
        self.batch: Batch = {
            side: {name: np.zeros((rows, length), np.int32) for name in FIELDS[side]}
            for side, length in config.lengths.items()
        }
        self._room = {
            side: np.full(rows, length) for side, length in config.lengths.items()
        }  # tokens; 0 of a closed row
        self._segments = np.zeros(rows, np.int64)
        self._capacity = max(config.lengths.values()) if config.packing else 1
        self._open_rows = rows
        self._positions = np.arange(max(config.lengths.values()))

    @property
    def full(self) -> bool:
        """Whether no pair at all can be added any more."""
        return not self._open_rows

    @property
    def any(self) -> bool:
        """Whether a pair has been added."""
        return bool(np.any(self._segments))

    def add(self, example: Example) -> bool:
        """Puts the pair into the first row that has room on both sides; returns False if none has."""
        texts = {side: getattr(example, side) for side in self.batch}
        fitting = functools.reduce(np.logical_and, (self._room[side] > len(tokens) for side, tokens in texts.items()))
        row = int(fitting.argmax())
        if not fitting[row]:
            return False
        self._segments[row] += 1
        for side, tokens in texts.items():
            self._write(side, row, tokens)
        if self._segments[row] == self._capacity or not all(room[row] for room in self._room.values()):
            self._close(row)
        return True

    def _close(self, row: int):
        self._open_rows -= 1
        for room in self._room.values():
            room[row] = 0

    def _write(self, side: str, row: int, tokens: np.ndarray):
        arrays, room, length = self.batch[side], self._room[side], len(tokens) + 1
        start = arrays["ids"].shape[1] - room[row]
        last = start + length - 1
        ended = arrays["ids" if side == "source" else "labels"][row]
        ended[start:last], ended[last] = tokens, SPECIAL_IDS["eos"]
        if side == "target":
            begun = arrays["ids"][row]
            begun[start], begun[start + 1 : last + 1] = SPECIAL_IDS["bos"], tokens
        arrays["segment_ids"][row, start : last + 1] = self._segments[row]
        arrays["positions"][row, start : last + 1] = self._positions[:length]
        room[row] -= length


def pack(
    examples: Iterator[Example], config: InputConfig, rows: int, waiting: Iterable[Example] = ()
) -> Iterator[tuple[Batch, list[Example]]]:
    """Fills batches of `rows` rows with examples in stream order.

    A pair goes to the first row with room. One that finds none waits for the next batch, which it opens; when
    `config.lookahead` pairs wait, the batch is closed. So what lies between two batches is the place in the stream and
    at most `lookahead` waiting pairs, and every pair comes exactly once.

    Args:
      examples: the stream, finite or not. Pairs that fit no empty row must have been left out, here and in `waiting`.
      config: shapes and lookahead.
      rows: of a batch.
      waiting: pairs that waited when the stream was left.

    Yields:
      (batch, the pairs that wait after it). The last batch of a finite stream may hold empty rows.

    Raises:
      ValueError: nothing but pairs that fit no empty row are left to place.
    """
    waiting, stream_ended = list(waiting), False
    while waiting or not stream_ended:
        filling = Rows(config, rows)
        waiting = [example for example in waiting if not filling.add(example)]
        while len(waiting) < config.lookahead and not filling.full and not stream_ended:
            example = next(examples, None)
            if example is None:
                stream_ended = True
            elif not filling.add(example):
                waiting.append(example)
        if filling.any:
            yield filling.batch, waiting
        elif waiting:
            raise ValueError(f"example {waiting[0].number} fits no empty row and would wait forever; leave it out")


def padding(batch: Batch) -> dict[str, float]:
    """The share of positions that hold no token, by side."""
    return {side: 1.0 - float(np.mean(arrays["segment_ids"] > 0)) for side, arrays in batch.items()}
