"""Sequence packing: pairs of any length become batches of one shape, with several pairs per row and little padding.

A batch is a nested dict of int32 arrays,

    {"source": {"ids", "segment_ids", "positions"},            each [B, S]
     "target": {"ids", "labels", "segment_ids", "positions"}}  each [B, T]

Source ids end with eos; target ids (the decoder's input) begin with bos, labels end with eos. The pairs of a row are
its segments 1, 2, ...; segment 0 is padding. Positions restart at 0 in each segment. Attention is restricted to a
segment. A language model's batch has no source.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from lingvo_moe import ranges
from lingvo_moe.data.tokenizer import OF_CORPUS, SPECIAL_IDS, Tokenizers
from lingvo_moe.errors import UserError
from lingvo_moe.ranges import COUNT, COUNT_OR_0, SHARE, Range
from lingvo_moe.sharding.layout import AUTO, DeviceMesh, Layout, Spec
from lingvo_moe.utils.counts import counted

READERS_KEY = "readers"  # of `Readers.fingerprints`, in the metadata of checkpoints and of files of weights
Batch = dict[str, dict[str, np.ndarray]]
FIELDS = {"source": ("ids", "segment_ids", "positions"), "target": ("ids", "labels", "segment_ids", "positions")}
_LENGTH_AXES = {"source": "S", "target": "T"}
_CORES_PER_HOST = 8  # of a TPU v3


class BatchConfig:
    """What every input is configured by. A dataclass below it declares the fields.

    Attributes:
      batch_size: B, the rows of a batch over all processes.
      lookahead: packing closes a batch when this many examples do not fit into it, see `pack`.
      shards: see `num_shards`.
    """

    batch_size: int
    lookahead: int
    shards: int

    @property
    def lengths(self) -> dict[str, int]:
        """The number of positions (tokens, frames, voxels) of a row, by side."""
        raise NotImplementedError

    @property
    def model_fields(self) -> dict[str, int]:
        """What the input decides of the model: the values of its fields, by name."""
        return {}

    def specs(self) -> dict[str, dict[str, Spec]]:
        """Returns the Spec of each array of a (global) batch, nested as the batch is."""
        raise NotImplementedError

    def fits(self, example: Example) -> bool:
        """Returns whether an example fits into an empty row; the pipeline rejects one that does not."""
        raise NotImplementedError

    def none_fits(self, examples: str) -> str:
        """Returns the message of an error: none of these examples, which are of a corpus, `fits`."""
        return f"none of {examples} fits {self.shown_lengths}; increase with {self.longer_rows}"

    @property
    def shown_lengths(self) -> str:
        """The lengths of rows, by setting, for messages."""
        return " and ".join(f"input.{side}_length={length}" for side, length in self.lengths.items())

    @property
    def longer_rows(self) -> str:
        """The flags that change them."""
        return " and ".join(f"--set input.{side}_length=..." for side in self.lengths)

    def empty_rows(self, count: int) -> Rows:
        """Returns rows to fill with examples."""
        raise NotImplementedError

    @property
    def num_shards(self) -> int:
        """The number of shards of a training batch: the largest number up to `shards` that divides `batch_size`."""
        return next(number for number in range(self.shards, 0, -1) if self.batch_size % number == 0)

    @property
    def shard_rows(self) -> int:
        """The number of rows of a shard: shard i has rows `i * shard_rows` to `(i + 1) * shard_rows - 1`."""
        return self.batch_size // self.num_shards

    def shards_of_rows(self, rows: range) -> range:
        """Returns the shards that make up these rows of a batch. Raises UserError if the rows cut a shard."""
        if rows.start % self.shard_rows or rows.stop % self.shard_rows:
            fitting = self.batch_size // math.gcd(self.batch_size, rows.start, rows.stop)
            raise UserError(
                f"this process feeds rows {rows.start} to {rows.stop - 1} of a batch, which are not a whole number "
                f"of its shards of {counted(self.shard_rows, 'row')} (input.shards). Pass --set input.shards={fitting} "
                "and start in another --logdir, or use fewer processes."
            )
        return range(rows.start // self.shard_rows, rows.stop // self.shard_rows)


@dataclasses.dataclass(frozen=True)
class InputConfig(BatchConfig):
    """The shape and the content of batches of texts, for training and evaluation.

    Attributes:
      batch_size: B, the rows of a batch over all processes.
      source_length: S, the tokens of a source row, including the eos of each sentence; 0 for a language model, which
        reads targets alone.
      target_length: T, the tokens of a target row, including the bos (in the labels, the eos) of each sentence. Padding
        is least if T : S equals target tokens : source tokens of the corpus.
      temperature: of the sampling of languages: 1 in proportion to the corpus, 5 as in M4, inf all equal.
      sentence_balance: 0 reads every pair of a language equally often, 1 every English sentence, however many languages
        have it; values between are between. See `sentence_balance`.
      name_substitution: the share of the training pairs with names that have new ones; see `name_substitution`.
      source_language, target_language: for tokenizers that have pieces for languages, with which texts begin, or
        sources alone (see `data.tokenizer`); empty for others. `corpus` stands for the language of each pair, by its
        label in the corpus (see `data.pair_languages`): as the source's, pairs are read from it into English, as the
        target's from English.
      bos_id: the token that begins the decoder's input; 1, that of eos, in fairseq's models.
      packing: whether a row may have several pairs. Without it a row is one pair.
      lookahead: packing closes a batch when this many pairs do not fit into it; they start the next one. A larger value
        gives less padding. 1 is plain first-fit in stream order.
      seed: of the order of the training stream.
      shards: a training batch's rows are packed in this number of independent shards, or in the next smaller number
        that divides batch_size; it is the largest number of processes that can share the work. The content of a batch
        depends on this number, never on the number of processes. Eight shards pad 0.3 % more of the positions than one
        (preset `pypi`, the small models of version 0.1.0).

    Raises:
      UserError: a value that gives no batch.
    """

    batch_size: int = 32
    source_length: int = 96
    target_length: int = 48
    temperature: float = 5.0
    sentence_balance: float = 0.0
    name_substitution: float = 0.0
    source_language: str = ""
    target_language: str = ""
    bos_id: int = SPECIAL_IDS["bos"]
    packing: bool = True
    lookahead: int = 16
    seed: int = 0
    shards: int = 8

    def __post_init__(self):
        lengths = {
            "source_length": Range(2 if self.source_length else 0, COUNT.maximum),
            "target_length": Range(2, COUNT.maximum),
        }
        counts = dict.fromkeys(("batch_size", "lookahead", "shards"), COUNT)
        temperature = Range(exclusive_minimum=True, infinite=True)
        shares = dict.fromkeys(("sentence_balance", "name_substitution"), SHARE)
        others = {"seed": COUNT_OR_0, "bos_id": COUNT_OR_0, "temperature": temperature, **shares}
        ranges.check("input.", self, {**lengths, **counts, **others})
        if self.source_language and not self.source_length:
            raise UserError(
                f"input.source_language is {self.source_language}, but a language model reads no source; leave it out."
            )
        if self.source_language == self.target_language == OF_CORPUS:
            raise UserError(
                f"input.source_language and input.target_language are both {OF_CORPUS}, but one side of each pair is "
                f"English. Set one of them to the model's name of English, such as eng_Latn or en."
            )

    @property
    def lengths(self) -> dict[str, int]:
        """See `BatchConfig`; a language model has no source."""
        lengths = {"source": self.source_length, "target": self.target_length}
        return {side: length for side, length in lengths.items() if length}

    @property
    def tokens(self) -> int:
        """The number of tokens of a batch, of both sides together."""
        return self.batch_size * sum(self.lengths.values())

    def specs(self) -> dict[str, dict[str, Spec]]:
        """See `BatchConfig`."""
        return {
            side: dict.fromkeys(FIELDS[side], Spec((self.batch_size, length), "int32", f"B{_LENGTH_AXES[side]}"))
            for side, length in self.lengths.items()
        }

    def fits(self, example: Example) -> bool:
        """See `BatchConfig`; of a pair with its eos."""
        return all(len(getattr(example, side)) < length for side, length in self.lengths.items())

    def empty_rows(self, count: int) -> Rows:
        """See `BatchConfig`."""
        return PackedRows(self, count)

    def open_readers(self, corpus: str | pathlib.Path, tokenizers: str | pathlib.Path) -> Readers:
        """Opens what reads the sides of a corpus's pairs; raises UserError if it is missing or corrupt."""
        del corpus  # its texts are the input
        loaded = Tokenizers.load(tokenizers)
        of_sides: dict[str, Reader] = {side: loaded.by_side[side] for side in self.lengths}
        return Readers(of_sides, loaded.hashes)

    @property
    def languages(self) -> dict[str, str]:
        """The languages of the texts, by side, as the fields name them."""
        return {side: getattr(self, f"{side}_language") for side in self.lengths}

    def fingerprints(self, tokenizers: str | pathlib.Path) -> tuple[str, ...]:
        """Returns `Readers.fingerprints`, whatever the languages; raises UserError as `Tokenizers.load`."""
        return Tokenizers.load(tokenizers).hashes


def default_shards(mesh: DeviceMesh, layout: str = AUTO) -> int:
    """Returns the `InputConfig.shards` with which each host of a TPU slice can feed the rows of its own cores.

    Args:
      mesh: of the slice's cores.
      layout: the name of the registered layout, which decides what axis of the mesh shards the batch.
    """
    divisor = Layout.of(mesh, layout).num_shards("B", "B")
    return max(InputConfig.shards, min(divisor, mesh.size // _CORES_PER_HOST))


class Example(NamedTuple):
    """An example: a tokenised sentence pair, a recording and its transcript, or a volume and its labels.

    Attributes:
      stream_index: its position in the stream.
      source: `[source tokens] int32`, without eos; empty for a language model; of a recording `[frames, F] float32`; of
        a volume `[X, Y, Z, 1] float32`.
      target: `[target tokens] int32`, without bos and eos; of a volume `[X, Y, Z] int32`.
    """

    stream_index: int
    source: np.ndarray
    target: np.ndarray


class Reader(Protocol):
    """Reads one side of a corpus's pairs: a tokenizer, or the features of recordings."""

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns one array for each text; its first dimension counts tokens or frames."""
        ...

    def in_graph(self, call: Callable) -> Any:
        """Returns an object whose `tokenize` maps texts `[N]` to the same as a ragged tensor.

        Args:
          call: runs a Python function in the graph, as `call(function, argument, dtype of the result)`, and reports its
            exceptions.
        """
        ...


class Readers(NamedTuple):
    """What reads the pairs of a corpus.

    Attributes:
      by_side: readers of the sides that a batch has.
      fingerprints: hashes or texts of what decides their results.
    """

    by_side: dict[str, Reader]
    fingerprints: tuple[str, ...]


class Rows(Protocol):
    """A batch that is filled with examples; see `PackedRows` and `ArrayRows`."""

    batch: Batch

    @property
    def full(self) -> bool:
        """Whether no further example can be added."""
        ...

    @property
    def any(self) -> bool:
        """Whether an example has been added."""
        ...

    def add(self, example: Example) -> bool:
        """Puts the example into a row with enough space; returns False if there is none."""
        ...


class PackedRows:
    """A batch that is filled by first-fit packing.

    Args:
      config: the lengths of a row, and whether it may have several pairs.
      rows: the number of rows.
    """

    def __init__(self, config: InputConfig, rows: int):
        self.batch: Batch = {
            side: {name: np.zeros((rows, length), np.int32) for name in FIELDS[side]}
            for side, length in config.lengths.items()
        }
        self._free = {side: np.full(rows, length) for side, length in config.lengths.items()}  # tokens; closed rows: 0
        self._segments, self._bos_id = np.zeros(rows, np.int64), config.bos_id
        self._max_segments = max(config.lengths.values()) if config.packing else 1
        self._open_rows = rows
        self._positions = np.arange(max(config.lengths.values()))

    @property
    def full(self) -> bool:
        """Whether no further pair can be added."""
        return not self._open_rows

    @property
    def any(self) -> bool:
        """Whether a pair has been added."""
        return bool(np.any(self._segments))

    def add(self, example: Example) -> bool:
        """Puts the pair into the first row with enough free tokens on both sides; returns False if there is none."""
        texts = {side: getattr(example, side) for side in self.batch}
        fitting = functools.reduce(np.logical_and, (self._free[side] > len(tokens) for side, tokens in texts.items()))
        row = int(fitting.argmax())
        if not fitting[row]:
            return False
        self._segments[row] += 1
        for side, tokens in texts.items():
            self._write(side, row, tokens)
        if self._segments[row] == self._max_segments or not all(free[row] for free in self._free.values()):
            self._close(row)
        return True

    def _close(self, row: int):
        self._open_rows -= 1
        for free in self._free.values():
            free[row] = 0

    def _write(self, side: str, row: int, tokens: np.ndarray):
        arrays, free, length = self.batch[side], self._free[side], len(tokens) + 1
        start = arrays["ids"].shape[1] - free[row]
        last = start + length - 1
        with_eos = arrays["ids" if side == "source" else "labels"][row]
        with_eos[start:last], with_eos[last] = tokens, SPECIAL_IDS["eos"]
        if side == "target":
            with_bos = arrays["ids"][row]
            with_bos[start], with_bos[start + 1 : last + 1] = self._bos_id, tokens
        arrays["segment_ids"][row, start : last + 1] = self._segments[row]
        arrays["positions"][row, start : last + 1] = self._positions[:length]
        free[row] -= length


class ArrayRows:
    """A batch whose rows have one example each; a class below it puts an example's arrays into a row.

    Args:
      config: the arrays of a batch.
      rows: the number of rows.
    """

    def __init__(self, config: BatchConfig, rows: int):
        self.batch: Batch = {
            side: {name: np.zeros((rows, *spec.shape[1:]), spec.dtype) for name, spec in fields.items()}
            for side, fields in config.specs().items()
        }
        self._used, self._rows = 0, rows

    @property
    def full(self) -> bool:
        """Whether no further example can be added."""
        return self._used == self._rows

    @property
    def any(self) -> bool:
        """Whether an example has been added."""
        return self._used > 0

    def add(self, example: Example) -> bool:
        """Puts the example into the next row; returns False if there is none."""
        if self.full:
            return False
        self.write(self._used, example)
        self._used += 1
        return True

    def write(self, row: int, example: Example):
        """Puts the example's arrays and segments into a row of zeros."""
        raise NotImplementedError


def pack(
    examples: Iterator[Example], config: BatchConfig, rows: int, pending: Iterable[Example] = ()
) -> Iterator[tuple[Batch, list[Example]]]:
    """Packs examples into batches of `rows` rows, in stream order.

    A pair goes into the first row where it fits. A pair that fits into no row is pending: it starts the next batch.
    When `config.lookahead` pairs are pending, the batch is closed. So the state between two batches is the position in
    the stream and at most `lookahead` pending pairs, and every pair occurs exactly once.

    Args:
      examples: the stream, finite or not. Pairs that do not fit into an empty row must have been rejected, here and in
        `pending`.
      config: shapes and lookahead.
      rows: of a batch.
      pending: the pairs that were pending when the stream was stopped.

    Yields:
      (batch, the pairs that are pending after it). The last batch of a finite stream may have empty rows.

    Raises:
      ValueError: a pair does not fit into an empty row.
    """
    pending, stream_ended = list(pending), False
    while pending or not stream_ended:
        packed = config.empty_rows(rows)
        pending = [example for example in pending if not packed.add(example)]
        while len(pending) < config.lookahead and not packed.full and not stream_ended:
            example = next(examples, None)
            if example is None:
                stream_ended = True
            elif not packed.add(example):
                pending.append(example)
        if packed.any:
            yield packed.batch, pending
        elif pending:
            raise ValueError(
                f"example {pending[0].stream_index} does not fit into an empty row; reject it before packing"
            )


def padding_fractions(batch: Batch) -> dict[str, float]:
    """Returns the fraction of positions (of volumes: of rows) without content, by each side that has segments."""
    segments = {side: arrays["segment_ids"] for side, arrays in batch.items() if "segment_ids" in arrays}
    return {side: 1.0 - float(np.mean(ids > 0)) for side, ids in segments.items()}
