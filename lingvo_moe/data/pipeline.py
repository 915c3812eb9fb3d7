"""The input pipeline: batches of examples, endless and resumable for training, else finite.

`batching.pack` packs examples into rows, and batches are prefetched in the background. Example n of training is a pure
function of (seed, n), so the state of a stream between two batches is the index of the next example and the indices of
the few pending ones. A batch consists of shards, which are independent streams, so that processes can share the work.
Examples are pairs of a corpus (`corpus_stream`) or made by a program (`volumes`).
"""

from __future__ import annotations

import collections
import concurrent.futures
import itertools
import pathlib
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from lingvo_moe.data.batching import FIELDS, READERS_KEY, Batch, BatchConfig, Example, InputConfig, pack
from lingvo_moe.data.corpus_stream import HeldOutPairs, TrainPairs
from lingvo_moe.data.tokenizer import SPECIAL_IDS, Tokenizer
from lingvo_moe.data.volumes import HeldOutVolumes, TrainVolumes, VolumeInput
from lingvo_moe.errors import UserError
from lingvo_moe.utils.hashes import sha256

Item = TypeVar("Item")
State = dict[str, Any]
_STATE_VERSION = 2  # 1 had no version and other keys
_PREFETCHED_BATCHES = 2
_MAX_CONSECUTIVE_REJECTIONS = 10_000  # examples


class Stream(Protocol):
    """Training examples by number.

    Attributes:
      identity: what decides which example has number n; its text is hashed.
      reader_fingerprints: see `batching.Readers.fingerprints`.
    """

    identity: tuple
    reader_fingerprints: tuple[str, ...]

    def examples(self, first: int, step: int) -> Iterator[Example]:
        """Yields the examples first, first + step, ... endlessly."""
        ...

    def examples_at(self, indices: np.ndarray) -> Iterator[Example]:
        """Yields the examples `indices` `[N]`: the few pending ones that a resumed stream starts with."""
        ...


class HeldOut(Protocol):
    """The examples of a held-out split."""

    def examples(self, shuffled: bool) -> Iterator[Example]:
        """Yields all examples once; see `EvalInput.batches`."""
        ...


class TrainInput:
    """The training batches of a model.

    Attributes:
      stream_id: a hash of all that decides which example has number n: of a corpus, tokenizers, temperature,
        sentence balance, name substitution and seed.
      readers_id: a hash of what reads its texts, the tokenizers.
    """

    def __init__(
        self, corpus: str | pathlib.Path, tokenizers: str | pathlib.Path, config: BatchConfig, in_graph: bool = True
    ):
        """Opens the training examples: those of a corpus, unless the input makes its own.

        Args:
          corpus: its directory.
          tokenizers: their directory.
          config: the shape and the content of batches.
          in_graph: whether TensorFlow reads a corpus, which gives the same batches as without it.

        Raises:
          UserError: a directory is missing or corrupt, or the corpus has no training pair.
        """
        self._config, self._examples = config, _open_stream(corpus, tokenizers, config, in_graph)
        self.stream_id = sha256(repr(self._examples.identity))[:16]
        self.readers_id = sha256(repr(self._examples.reader_fingerprints))[:16]

    def batches(
        self, state: State | None = None, shards: range | None = None
    ) -> Generator[tuple[Batch, State], None, None]:
        """Returns an endless iterator of (batch, state); an iterator from that state continues with the next batch.

        A state is plain JSON. `version`, `stream` and `shards` identify the stream that it belongs to; `positions` has
        for each shard, by its number, `next`, the index of its next example; `pending`, the indices of the examples
        that did not fit into a batch yet; and `rejected`, the number of examples rejected since the start because they
        do not fit into an empty row.

        Args:
          state: of the previous batch, with the positions of all `shards` (see `merge_states`); None to start.
          shards: yield only the rows of these, and a state with their positions; None for all. Shard i packs the
            examples n with n % `input.shards` == i.

        Raises:
          UserError: immediately, a state of another stream; later, a corpus without a pair that fits into a row.
        """
        shards = range(self._config.num_shards) if shards is None else shards
        identity = self._identity
        if state is None:
            start = {str(shard): {"next": shard, "pending": [], "rejected": 0} for shard in shards}
            state = {**identity, "positions": start}
        self.check(state)
        streams = [self._shard(state["positions"][str(shard)]) for shard in shards]
        return _prefetch(
            (
                _concatenate_rows([batch for batch, _ in parts]),
                {
                    **identity,
                    READERS_KEY: list(self._examples.reader_fingerprints),
                    "positions": {str(shard): position for shard, (_, position) in zip(shards, parts)},
                },
            )
            for parts in zip(*streams)
        )

    def check(self, state: State):
        """Raises UserError for a state of another stream, which `batches` could not continue."""
        resumed = "the position in the training data cannot be resumed"
        if state.get("version") != _STATE_VERSION:
            raise UserError(
                f"{resumed}: another version of this program saved it (version {state.get('version')}, expected "
                f"{_STATE_VERSION}). Start in another --logdir."
            )
        fingerprints = list(self._examples.reader_fingerprints)
        if state.get(READERS_KEY, fingerprints) != fingerprints:
            raise UserError(
                f"{resumed}: what reads the texts or recordings (tokenizers, "
                f"input.features) is not that of before. Give the same --tokenizers and --set, or start in another "
                f"--logdir."
            )
        for key, value in self._identity.items():
            if state.get(key) != value:
                raise UserError(
                    f"{resumed}: its {key} is {state.get(key)}, now it is {value}. Give the same corpus, "
                    f"input.temperature, input.sentence_balance, input.name_substitution, input.seed, "
                    f"input.source_language, input.target_language and input.shards as before, or start in "
                    f"another --logdir."
                )

    @property
    def _identity(self) -> State:
        return {"version": _STATE_VERSION, "stream": self.stream_id, "shards": self._config.num_shards}

    def _shard(self, position: dict[str, Any]) -> Iterator[tuple[Batch, dict[str, Any]]]:
        """Yields (the shard's rows of the next batch, its position after it), endlessly."""
        position, shards = dict(position), self._config.num_shards

        def fitting(examples: Iterator[Example]) -> Iterator[Example]:
            rejections = 0
            for example in examples:
                position["next"] = max(position["next"], example.stream_index + shards)
                if self._config.fits(example):
                    rejections = 0
                    yield example
                else:
                    rejections += 1
                    position["rejected"] += 1
                    self._check_rejections(rejections)

        # Pending examples did fit into an empty row when they were saved; rows may be shorter now.
        indices = np.array(position["pending"], np.int64)
        pending = fitting(self._examples.examples_at(indices)) if len(indices) else ()
        stream = fitting(self._examples.examples(position["next"], shards))
        for batch, still_pending in pack(stream, self._config, self._config.shard_rows, pending):
            yield batch, {**position, "pending": [example.stream_index for example in still_pending]}

    def _check_rejections(self, rejections: int):
        if rejections >= _MAX_CONSECUTIVE_REJECTIONS:
            raise UserError(self._config.none_fits(f"{rejections} consecutive training pairs"))


def _open_stream(
    corpus: str | pathlib.Path, tokenizers: str | pathlib.Path, config: BatchConfig, in_graph: bool
) -> Stream:
    if isinstance(config, VolumeInput):
        return TrainVolumes(config)
    return TrainPairs(corpus, tokenizers, _of_texts(config), in_graph)


def _open_held_out(
    corpus: str | pathlib.Path,
    tokenizers: str | pathlib.Path,
    config: BatchConfig,
    split: str,
    languages: Sequence[str],
    max_pairs: int | None,
) -> HeldOut:
    if isinstance(config, VolumeInput):
        return HeldOutVolumes(config, split, max_pairs)
    return HeldOutPairs(corpus, tokenizers, _of_texts(config), split, languages, max_pairs)


def _of_texts(config: BatchConfig) -> InputConfig:
    if isinstance(config, InputConfig):
        return config
    raise UserError(f"the input is {type(config).__name__}, which has no examples; expected an InputConfig.")


def merge_states(states: Sequence[State]) -> State:
    """Returns the state of all shards, from the states of streams with some shards each, after the same batch."""
    positions = {shard: position for state in states for shard, position in state["positions"].items()}
    return {**states[0], "positions": positions}


def rejected_pairs(state: State) -> int:
    """Returns the number of pairs that the shards of a state have rejected since the start as too long for a row."""
    return sum(position["rejected"] for position in state["positions"].values())


def drawn_pairs(state: State) -> int:
    """Returns the number of pairs that the shards of a state have drawn since the start, rejected ones included."""
    return sum(position["next"] // state["shards"] for position in state["positions"].values())


class EvalInput:
    """Held-out examples, packed as training packs them.

    Attributes:
      num_rejected: the number of pairs that the current or last pass rejected because they do not fit into a row;
        none in a shuffled pass, which has only pairs that fit.
    """

    def __init__(
        self,
        corpus: str | pathlib.Path,
        tokenizers: str | pathlib.Path,
        config: BatchConfig,
        split: str = "valid",
        languages: Sequence[str] = (),
        max_pairs: int | None = None,
    ):
        """Opens the examples of a split: those of a corpus, unless the input makes its own.

        Args:
          corpus: its directory.
          tokenizers: their directory.
          config: the shape of batches.
          split: `valid` or `test`.
          languages: which of the corpus's; empty for all that have the split.
          max_pairs: of each language, see `Corpus.sample`; of volumes, of all; None for all.

        Raises:
          UserError: a directory is missing or corrupt, or a language has no such pairs.
        """
        self._config = config
        self._examples = _open_held_out(corpus, tokenizers, config, split, languages, max_pairs)
        self.num_rejected = 0

    def batches(self, shuffled: bool = False, first: int | None = None) -> Iterator[Batch]:
        """Yields batches of all pairs that fit into a row: one of each language, then a second of each, and so on.

        The last batch may have empty rows. An empty split gives no batch.

        Args:
          shuffled: whether each target gets the source of another pair of its language that fits, half of them away.
            A language with only one such pair is then left out.
          first: only the targets of this many batches that are not shuffled; None for all. With other sources, these
            targets may need a batch more or less.

        Raises:
          ValueError: with the first batch, `shuffled` volumes.
        """
        examples = self._fitting(shuffled)
        if shuffled and first is not None:
            examples, first = self._with_targets_of_first(first, examples), None
        for batch, _ in itertools.islice(self._packed(examples), first):
            yield batch

    def _with_targets_of_first(self, num_batches: int, shuffled: Iterator[Example]) -> Iterator[Example]:
        """Yields the shuffled examples whose targets are in the first batches that are not shuffled."""
        read: list[int] = []

        def recorded(examples: Iterator[Example]) -> Iterator[Example]:
            for example in examples:
                read.append(example.stream_index)
                yield example

        packed = list(itertools.islice(self._packed(recorded(self._fitting(shuffled=False))), num_batches))
        placed = set(read) - {example.stream_index for _, pending in packed[-1:] for example in pending}
        last = max(placed, default=-1)
        for example in itertools.takewhile(lambda example: example.stream_index <= last, shuffled):
            if example.stream_index in placed:
                yield example

    def _packed(self, examples: Iterator[Example]) -> Iterator[tuple[Batch, list[Example]]]:
        return pack(examples, self._config, self._config.batch_size)

    def _fitting(self, shuffled: bool) -> Iterator[Example]:
        self.num_rejected = 0
        for example in self._examples.examples(shuffled):
            if self._config.fits(example):
                yield example
            else:
                self.num_rejected += 1


def source_batches(
    sentences: Sequence[str], tokenizer: Tokenizer, batch_size: int, source_length: int
) -> Iterator[tuple[list[int], dict[str, np.ndarray]]]:
    """Returns an iterator of (indices of the sentences in this batch, batch), shortest sentences first.

    A batch has `ids`, `segment_ids` and `positions`, `[batch_size, source_length] int32`, one sentence per row; surplus
    rows of the last batch are empty.

    Raises:
      ValueError: a sentence does not fit into a row.
    """
    tokens = tokenizer.encode(sentences)
    longest = max(map(len, tokens), default=0)
    if longest >= source_length:
        raise ValueError(f"a sentence of {longest} tokens in rows of {source_length}, which also hold its eos")
    order = sorted(range(len(tokens)), key=lambda index: (len(tokens[index]), index))
    chunks = (order[start : start + batch_size] for start in range(0, len(order), batch_size))
    return (
        (indices, _source_batch([tokens[index] for index in indices], batch_size, source_length)) for indices in chunks
    )


def _source_batch(rows: list[np.ndarray], batch_size: int, source_length: int) -> dict[str, np.ndarray]:
    batch = {field: np.zeros((batch_size, source_length), np.int32) for field in FIELDS["source"]}
    for row, ids in enumerate(rows):
        length = len(ids) + 1
        batch["ids"][row, :length] = np.append(ids, np.int32(SPECIAL_IDS["eos"]))
        batch["segment_ids"][row, :length] = 1
        batch["positions"][row, :length] = np.arange(length)
    return batch


def _concatenate_rows(parts: Sequence[Batch]) -> Batch:
    """Returns a batch with the rows of all parts."""
    if len(parts) == 1:
        return parts[0]
    return {
        side: {name: np.concatenate([part[side][name] for part in parts]) for name in fields}
        for side, fields in parts[0].items()
    }


def _prefetch(items: Iterator[Item]) -> Generator[Item, None, None]:
    """Yields the items in order; a background thread prefetches up to `_PREFETCHED_BATCHES` of them."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="input") as thread:
        prefetched = collections.deque(thread.submit(next, items) for _ in range(_PREFETCHED_BATCHES))
        while True:
            prefetched.append(thread.submit(next, items))
            yield prefetched.popleft().result()
