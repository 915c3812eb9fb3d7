"""From a corpus and its tokenizers to batches: endless and resumable for training, finite for everything else.

Reading, sampling and tokenising is a tf.data pipeline; packing its examples into rows is `batching.pack`; both run
ahead in the background. Example n of training is a pure function of (seed, n), see `mixture`, so the state of a stream
between two batches is the number of the next example and those of the few that wait for room.
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
_CHUNK = 256  # examples tokenised at a time
_CHUNKS_AHEAD = 8
_BATCHES_AHEAD = 2
_END_OF_STREAM = 1 << 62
_PATIENCE = 10_000  # examples in a row without one that fits
_NO_TOKENS = np.zeros(0, np.int32)


class TrainInput:
    """The training stream of a corpus."""

    def __init__(self, corpus: str | pathlib.Path, tokenizers: str | pathlib.Path, config: InputConfig):
        """Opens both directories and reads the training pairs.

        Raises:
          UserError: either is missing or damaged, or there is nothing to train on.
        """
        opened, self._tokenizers, self._config = Corpus.open(corpus), Tokenizers.load(tokenizers), config
        sizes = tuple(opened.count("train", language) for language in opened.languages)
        self._mixture = Mixture(sizes, config.temperature, config.seed)
        self._pairs = [opened.pairs("train", language) if size else ()
                       for language, size in zip(opened.languages, sizes, strict=True)]
        models = [sha256(getattr(self._tokenizers, side).model) for side in SIDES]
        self._stream_id = sha256(repr((opened.fingerprint, models, config.temperature, config.seed)).encode())[:16]

    def batches(self, state: dict[str, Any] | None = None, num_hosts: int = 1,
                host: int = 0) -> Iterator[tuple[Batch, dict[str, Any]]]:
        """Returns an endless iterator of (batch, state); one begun from that state goes on with the batch after it.

        A state is plain JSON: `next`, the number of the next example; `waiting`, the numbers of those that found no
        room yet; `too_long`, how many have been left out since the start because not even an empty row has room for
        them; and what it belongs to: `stream`, `num_hosts`, `host`.

        Args:
          state: of the batch before, or None to begin.
          num_hosts, host: this host's part: the examples n with n % num_hosts == host, and its share of the rows.

        Raises:
          UserError: at once, a batch that cannot be divided among the hosts or a state of another stream; later, a
            corpus of which no pair fits a row.
        """
        rows = self._config.host_rows(num_hosts)
        belongs_to = {"stream": self._stream_id, "num_hosts": num_hosts, "host": host}
        state = state or {**belongs_to, "next": host, "waiting": [], "too_long": 0}
        for key, value in belongs_to.items():
            if state.get(key) != value:
                raise UserError(f"the position in the training data cannot be resumed: its {key} is {state.get(key)}, "
                                f"now it is {value}. Give the same corpus, tokenizers, input.temperature, input.seed "
                                "and number of hosts as before, or begin in another --logdir.")
        return _ahead(self._batches(state, rows))

    def _batches(self, state: dict[str, Any], rows: int) -> Iterator[tuple[Batch, dict[str, Any]]]:
        position = {"next": state["next"], "too_long": state["too_long"]}

        def fitting(examples: Iterator[Example]) -> Iterator[Example]:
            missed = 0
            for example in examples:
                position["next"] = max(position["next"], example.number + state["num_hosts"])
                if example.fits(self._config):
                    missed = 0
                    yield example
                else:
                    missed += 1
                    position["too_long"] += 1
                    self._check_patience(missed)

        # What waited fitted the rows of then; they may be shorter now.
        waiting = fitting(self._tokenized(np.array(state["waiting"], np.int64))) if state["waiting"] else ()
        stream = fitting(self._stream(state["next"], state["num_hosts"]))
        for batch, left in pack(stream, self._config, rows, waiting):
            yield batch, {**state, **position, "waiting": [example.number for example in left]}

    def _check_patience(self, missed: int):
        if missed >= _PATIENCE:
            lengths = {f"input.{side}_length": length for side, length in self._config.lengths.items()}
            now = " and ".join(f"{name}={length}" for name, length in lengths.items())
            raised = " and ".join(f"--set {name}=..." for name in lengths)
            raise UserError(f"none of {missed} training pairs in a row fits {now}; raise with {raised}")

    def _stream(self, first: int, step: int) -> Iterator[Example]:
        """Examples first, first + step, ..."""
        tokenizers = {side: getattr(self._tokenizers, side).in_graph() for side in self._config.lengths}

        def tokenize(numbers):
            texts = tf.numpy_function(self._texts, [numbers], tf.string)
            texts.set_shape([None, 2])
            return numbers, {side: tokenizer.tokenize(texts[:, SIDES.index(side)]) for side, tokenizer in tokenizers.items()}

        chunks = tf.data.Dataset.range(first, _END_OF_STREAM, step).batch(_CHUNK, drop_remainder=True)
        for numbers, tokens in chunks.map(tokenize, num_parallel_calls=1).prefetch(_CHUNKS_AHEAD):
            yield from _examples(numbers.numpy().tolist(), {side: _rows(ragged) for side, ragged in tokens.items()})

    def _tokenized(self, numbers: np.ndarray) -> Iterator[Example]:
        """The examples `numbers` `[N]`, without TensorFlow: the few that a resumed stream begins with."""
        texts = self._texts(numbers)
        tokens = {side: getattr(self._tokenizers, side).encode([text.decode() for text in texts[:, SIDES.index(side)]])
                  for side in self._config.lengths}
        return _examples(numbers.tolist(), tokens)

    def _texts(self, numbers: np.ndarray) -> np.ndarray:
        """The pairs of examples `[N]`, as UTF-8: `[N, 2] bytes`."""
        drawn = zip(*(part.tolist() for part in self._mixture.draw(numbers)), strict=True)
        pairs = (self._pairs[language][index] for language, index in drawn)
        return np.array([[source.encode(), english.encode()] for source, english in pairs], dtype=object)


class EvalInput:
    """Held-out pairs, packed as training packs them.

    Attributes:
      too_long: how many pairs the pass in progress, or the last one, has left out because no row has room for them.
    """

    def __init__(self, corpus: str | pathlib.Path, tokenizers: str | pathlib.Path, config: InputConfig,
                 split: str = "valid"):
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


def source_batches(sentences: Sequence[str], tokenizer: Tokenizer, batch_size: int,
                   source_length: int) -> Iterator[tuple[list[int], dict[str, np.ndarray]]]:
    """Returns an iterator of (indices of the sentences in this batch, batch), shortest sentences first.

    A batch holds `ids`, `segment_ids` and `positions`, `[batch_size, source_length] int32`, a sentence a row; surplus
    rows of the last one are empty.

    Raises:
      UserError: a sentence, counted from line 1, that does not fit a row; at once, before any batch.
    """
    tokens = tokenizer.encode(sentences)
    for number, ids in enumerate(tokens, start=1):
        if len(ids) >= source_length:
            raise UserError(f"line {number} has {len(ids)} tokens; at most {source_length - 1} fit. Split the "
                            f"sentence, or pass --set input.source_length={len(ids) + 1}.")
    order = sorted(range(len(tokens)), key=lambda index: (len(tokens[index]), index))
    chunks = (order[start:start + batch_size] for start in range(0, len(order), batch_size))
    return ((indices, _source_batch([tokens[index] for index in indices], batch_size, source_length))
            for indices in chunks)


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
