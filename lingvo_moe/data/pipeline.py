"""From a corpus and its tokenizers to batches: endless and resumable for training, finite for everything else.

Reading, sampling and tokenising is a tf.data pipeline; packing its examples into rows is `batching.pack`; both run
ahead in the background. Example n of training is a pure function of (seed, n), see `mixture`, so the state of a stream
between two batches is the number of the next example and those of the few that wait for room. A batch is put together
from independent streams, its shards, so that processes can share them out.
"""

from __future__ import annotations

import collections
import concurrent.futures
import itertools
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from lingvo_moe.data.batching import FIELDS, Batch, Example, InputConfig, pack
from lingvo_moe.data.corpus import Corpus
from lingvo_moe.data.mixture import Mixture
from lingvo_moe.data.tokenizer import SIDES, SPECIAL_IDS, Tokenizer, Tokenizers, sha256
from lingvo_moe.errors import UserError
from lingvo_moe.lazy import tf

Item = TypeVar("Item")
State = dict[str, Any]
_CHUNK = 256  # examples tokenised at a time, by all shards together
_LEAST_CHUNK = 32  # by one of them
_CHUNKS_AHEAD = 8
_BATCHES_AHEAD = 2
_END_OF_STREAM = 1 << 62
_PATIENCE = 10_000  # examples in a row without one that fits
_NO_TOKENS = np.zeros(0, np.int32)


class TrainInput:
    """The training stream of a corpus.

    Attributes:
      stream_id: tells it from another one, whose example n is another pair.
    """

    def __init__(self, corpus: str | pathlib.Path, tokenizers: str | pathlib.Path, config: InputConfig):
        """Opens both directories and reads the training pairs.

        Raises:
          UserError: either is missing or damaged, or there is nothing to train on.
        """
        opened, self._tokenizers, self._config = Corpus.open(corpus), Tokenizers.load(tokenizers), config
        sizes = tuple(opened.count("train", language) for language in opened.languages)
        self._mixture = Mixture(sizes, config.temperature, config.seed)
        self._pairs = [
            opened.pairs("train", language) if size else ()
            for language, size in zip(opened.languages, sizes, strict=True)
        ]
        models = [sha256(getattr(self._tokenizers, side).model) for side in SIDES]
        self.stream_id = sha256(repr((opened.fingerprint, models, config.temperature, config.seed)).encode())[:16]

    def batches(self, state: State | None = None, shards: range | None = None) -> Iterator[tuple[Batch, State]]:
        """Returns an endless iterator of (batch, state); one begun from that state goes on with the batch after it.

        A state is plain JSON: `stream` and `shards` say what it belongs to, and `places` holds for each shard, by its
        number, `next`, the number of its next example; `waiting`, the numbers of those that found no room yet; and
        `too_long`, how many have been left out since the start because not even an empty row has room for them.

        Args:
          state: of the batch before, with the places of all `shards` (see `merge`); None to begin.
          shards: make only the rows of these, and a state with their places; None for all. Shard i packs the examples n
            with n % `input.shards` == i.

        Raises:
          UserError: at once, a state of another stream; later, a corpus of which no pair fits a row.
        """
        shards = range(self._config.num_shards) if shards is None else shards
        belongs_to = {"stream": self.stream_id, "shards": self._config.num_shards}
        begin = {str(shard): {"next": shard, "waiting": [], "too_long": 0} for shard in shards}
        state = state or {**belongs_to, "places": begin}
        for key, value in belongs_to.items():
            if state.get(key) != value:
                raise UserError(
                    f"the position in the training data cannot be resumed: its {key} is {state.get(key)}, now it is "
                    f"{value}. Give the same corpus, tokenizers, input.temperature, input.seed and input.shards as "
                    f"before, or begin in another --logdir."
                )
        parts = [self._shard(state["places"][str(shard)]) for shard in shards]
        return _ahead(
            (
                _joined([batch for batch, _ in together]),
                {**belongs_to, "places": {str(shard): place for shard, (_, place) in zip(shards, together)}},
            )
            for together in zip(*parts)
        )

    def _shard(self, place: dict[str, Any]) -> Iterator[tuple[Batch, dict[str, Any]]]:
        """(its rows of the next batch, its place then), endless."""
        place, shards = dict(place), self._config.num_shards

        def fitting(examples: Iterator[Example]) -> Iterator[Example]:
            missed = 0
            for example in examples:
                place["next"] = max(place["next"], example.number + shards)
                if example.fits(self._config):
                    missed = 0
                    yield example
                else:
                    missed += 1
                    place["too_long"] += 1
                    self._check_patience(missed)

        # What waited fitted the rows of then; they may be shorter now.
        waiting = fitting(self._tokenized(np.array(place["waiting"], np.int64))) if place["waiting"] else ()
        stream = fitting(self._stream(place["next"], shards))
        for batch, left in pack(stream, self._config, self._config.shard_rows, waiting):
            yield batch, {**place, "waiting": [example.number for example in left]}

    def _check_patience(self, missed: int):
        if missed >= _PATIENCE:
            lengths = {f"input.{side}_length": length for side, length in self._config.lengths.items()}
            now = " and ".join(f"{name}={length}" for name, length in lengths.items())
            raised = " and ".join(f"--set {name}=..." for name in lengths)
            raise UserError(f"none of {missed} training pairs in a row fits {now}; raise with {raised}")

    def _stream(self, first: int, step: int) -> Iterator[Example]:
        """Examples first, first + step, ... of one of `step` shards."""
        tokenizers = {side: getattr(self._tokenizers, side).in_graph() for side in self._config.lengths}
        failures: list[Exception] = []

        def texts_of(numbers):
            try:
                return self._texts(numbers)
            except Exception as error:
                failures.append(error)
                raise

        def tokenize(numbers):
            texts = tf.numpy_function(texts_of, [numbers], tf.string)
            texts.set_shape([None, 2])
            return numbers, {
                side: tokenizer.tokenize(texts[:, SIDES.index(side)]) for side, tokenizer in tokenizers.items()
            }

        chunk = max(_CHUNK // step, _LEAST_CHUNK)
        options = tf.data.Options()
        # There is nothing to tune, and whoever closes an iterator waits for the tuner's thread, which after some
        # minutes looks up but once in a minute: with Python's lock held, and once for each shard.
        options.autotune.enabled = False
        chunks = (
            tf.data.Dataset.range(first, _END_OF_STREAM, step).batch(chunk, drop_remainder=True).with_options(options)
        )
        try:
            for numbers, tokens in chunks.map(tokenize, num_parallel_calls=1).prefetch(_CHUNKS_AHEAD):
                yield from _examples(numbers.numpy().tolist(), {side: _rows(ragged) for side, ragged in tokens.items()})
        except tf.errors.OpError as error:
            raise (
                failures[0] if failures else error
            ) from None  # TensorFlow would tell ours as a part of a page of its own

    def _tokenized(self, numbers: np.ndarray) -> Iterator[Example]:
        """The examples `numbers` `[N]`, without TensorFlow: the few that a resumed stream begins with."""
        texts = self._texts(numbers)
        tokens = {
            side: getattr(self._tokenizers, side).encode([text.decode() for text in texts[:, SIDES.index(side)]])
            for side in self._config.lengths
        }
        return _examples(numbers.tolist(), tokens)

    def _texts(self, numbers: np.ndarray) -> np.ndarray:
        """The pairs of examples `[N]`, as UTF-8: `[N, 2] bytes`."""
        drawn = zip(*(part.tolist() for part in self._mixture.draw(numbers)), strict=True)
        pairs = (self._pairs[language][index] for language, index in drawn)
        return np.array([[source.encode(), english.encode()] for source, english in pairs], dtype=object)


def merge(states: Sequence[State]) -> State:
    """The state of all shards, from those of streams that made some of them each, at the same batch."""
    return {**states[0], "places": {shard: place for state in states for shard, place in state["places"].items()}}


def too_long(state: State) -> int:
    """How many pairs the shards of a state have left out since the start."""
    return sum(place["too_long"] for place in state["places"].values())


class EvalInput:
    """Held-out pairs, packed as training packs them.

    Attributes:
      too_long: how many pairs the pass in progress, or the last one, has left out because no row has room for them.
    """

    def __init__(
        self, corpus: str | pathlib.Path, tokenizers: str | pathlib.Path, config: InputConfig, split: str = "valid"
    ):
        """Opens both directories and reads the pairs of a split.

        Raises:
          UserError: either is missing or damaged.
        """
        opened, self._tokenizers, self._config = Corpus.open(corpus), Tokenizers.load(tokenizers), config
        self._pairs = [opened.pairs(split, language) for language in opened.languages_of(split)]
        self.too_long = 0

    def batches(self) -> Iterator[Batch]:
        """Yields batches of all pairs that fit a row: one of each language, then a second of each, and so on.

        The last one may hold empty rows. Nothing is yielded for an empty split.
        """
        self.too_long = 0
        for batch, _ in pack(self._fitting(), self._config, self._config.batch_size):
            yield batch

    def _fitting(self) -> Iterator[Example]:
        for example in self._examples():
            if example.fits(self._config):
                yield example
            else:
                self.too_long += 1

    def _examples(self) -> Iterator[Example]:
        longest = max(map(len, self._pairs), default=0)
        texts = (pairs[index] for index in range(longest) for pairs in self._pairs if index < len(pairs))
        numbers = itertools.count()
        while chunk := list(itertools.islice(texts, _CHUNK)):
            sentences = dict(zip(SIDES, zip(*chunk, strict=True), strict=True))
            tokens = {side: getattr(self._tokenizers, side).encode(sentences[side]) for side in self._config.lengths}
            yield from _examples(itertools.islice(numbers, len(chunk)), tokens)


def source_batches(
    sentences: Sequence[str], tokenizer: Tokenizer, batch_size: int, source_length: int
) -> Iterator[tuple[list[int], dict[str, np.ndarray]]]:
    """Returns an iterator of (indices of the sentences in this batch, batch), shortest sentences first.

    A batch holds `ids`, `segment_ids` and `positions`, `[batch_size, source_length] int32`, a sentence a row; surplus
    rows of the last one are empty.

    Raises:
      UserError: a sentence, counted from line 1, that does not fit a row; at once, before any batch.
    """
    tokens = tokenizer.encode(sentences)
    for number, ids in enumerate(tokens, start=1):
        if len(ids) >= source_length:
            raise UserError(
                f"line {number} has {len(ids)} tokens; at most {source_length - 1} fit. Split the "
                f"sentence, or pass --set input.source_length={len(ids) + 1}."
            )
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


def _examples(numbers: Iterable[int], tokens: dict[str, Sequence[np.ndarray]]) -> Iterator[Example]:
    """Examples of the tokens of each side that is read; a language model's have no source."""
    sides = (tokens.get(side, itertools.repeat(_NO_TOKENS)) for side in SIDES)
    return map(Example, numbers, *sides)


def _joined(parts: Sequence[Batch]) -> Batch:
    """A batch with the rows of all."""
    if len(parts) == 1:
        return parts[0]
    return {
        side: {name: np.concatenate([part[side][name] for part in parts]) for name in fields}
        for side, fields in parts[0].items()
    }


def _rows(ragged) -> list[np.ndarray]:
    """The rows of a ragged tensor, as views of its values."""
    return np.split(ragged.values.numpy(), ragged.row_splits.numpy()[1:-1])


def _ahead(items: Iterator[Item]) -> Iterator[Item]:
    """Yields the items, made in order by one background thread that is up to `_BATCHES_AHEAD` ahead."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="input") as thread:
        coming = collections.deque(thread.submit(next, items) for _ in range(_BATCHES_AHEAD))
        while True:
            coming.append(thread.submit(next, items))
            yield coming.popleft().result()
