"""From a corpus and its tokenizers to batches: endless and resumable for training, finite for evaluation and translation.

Reading, sampling and tokenising is a tf.data pipeline that runs ahead in the background; packing its examples into rows is
`batching.pack`. Example n of training is a pure function of (seed, n), see `mixture`, so the state of a stream between two
batches is the number of the next example and those of the few that wait for room.
"""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lingvo_moe.data.batching import SOURCE_FIELDS, Batch, Example, InputConfig, pack
from lingvo_moe.data.corpus import Corpus
from lingvo_moe.data.mixture import Mixture
from lingvo_moe.data.tokenizer import SPECIAL_IDS, Tokenizer, Tokenizers
from lingvo_moe.errors import UserError
from lingvo_moe.lazy import tf

_CHUNK = 256  # examples tokenised at a time
_END_OF_STREAM = 1 << 62


class TrainInput:
    """The training stream of a corpus.

    Attributes:
      too_long: how many examples were left out since the start because no row has room for them.
    """

    def __init__(self, corpus: str | pathlib.Path, tokenizers: str | pathlib.Path, config: InputConfig):
        """Opens both directories.

        Raises:
          UserError: either is missing or damaged, or there is nothing to train on.
        """
        self._corpus, self._tokenizers, self._config = Corpus.open(corpus), Tokenizers.load(tokenizers), config
        self._languages = list(self._corpus.languages)
        sizes = tuple(self._corpus.count("train", language) for language in self._languages)
        self._mixture = Mixture(sizes, config.temperature, config.seed)
        self.too_long = 0

    def batches(self, state: Any = None, num_hosts: int = 1, host: int = 0) -> Iterator[tuple[Batch, dict]]:
        """Yields (batch, state) for ever; a stream begun from that state goes on with the batch after it.

        Args:
          state: of the batch before, or None to begin; plain JSON.
          num_hosts, host: this host's part: every num_hosts-th example, and its share of the rows.

        Raises:
          UserError: a batch that cannot be divided among the hosts, or a corpus of which no pair fits a row.
        """
        state = state or {"next": host, "waiting": []}
        waiting = list(self._tokenized(np.array(state["waiting"], np.int64))) if state["waiting"] else []
        following = state["next"]

        def examples() -> Iterator[Example]:
            nonlocal following
            fitted, since = 0, 0
            for example in self._stream(following, num_hosts):
                following = example.number + num_hosts
                if example.fits(self._config):
                    fitted += 1
                    yield example
                    continue
                self.too_long += 1
                since += 1
                if not fitted and since >= 100_000:
                    raise UserError(f"none of {since} training pairs fits source_length={self._config.source_length} and "
                                    f"target_length={self._config.target_length}; raise them with --set input.source_length=...")

        for batch, left in pack(examples(), self._config, self._config.host_rows(num_hosts), waiting):
            yield batch, {"next": following, "waiting": [example.number for example in left]}

    def _stream(self, first: int, step: int) -> Iterator[Example]:
        source, target = (side.in_graph() for side in (self._tokenizers.source, self._tokenizers.target))

        def tokenize(numbers):
            texts = tf.numpy_function(self._texts, [numbers], tf.string)
            texts.set_shape([None, 2])
            return numbers, source.tokenize(texts[:, 0]), target.tokenize(texts[:, 1])

        chunks = tf.data.Dataset.range(first, _END_OF_STREAM, step).batch(_CHUNK, drop_remainder=True)
        for numbers, sources, targets in chunks.map(tokenize, num_parallel_calls=1).prefetch(8):
            yield from map(Example, numbers.numpy().tolist(), _rows(sources), _rows(targets))

    def _tokenized(self, numbers: np.ndarray) -> Iterator[Example]:
        texts = self._texts(numbers)
        sides = (tokenizer.encode([text.decode() for text in texts[:, column]])
                 for column, tokenizer in enumerate((self._tokenizers.source, self._tokenizers.target)))
        return map(Example, numbers.tolist(), *sides)

    def _texts(self, numbers: np.ndarray) -> np.ndarray:
        """The pairs of examples `[N]`, as UTF-8: `[N, 2] bytes`."""
        languages, indices = self._mixture.draw(numbers)
        pairs = [self._corpus.pairs("train", self._languages[language])[int(index)]
                 for language, index in zip(languages, indices)]
        return np.array([[source.encode(), target.encode()] for source, target in pairs], dtype=object)


class EvalInput:
    """Held-out pairs, packed as training packs them."""

    def __init__(self, corpus: str | pathlib.Path, tokenizers: str | pathlib.Path, config: InputConfig, split: str = "valid"):
        """Opens both directories; raises UserError where one is missing or damaged."""
        self._corpus, self._tokenizers, self._config, self._split = Corpus.open(corpus), Tokenizers.load(tokenizers), config, split

    def batches(self) -> Iterator[Batch]:
        """Yields batches of all pairs that fit a row, one of each language, then a second of each, and so on.

        The last one may hold empty rows. Nothing is yielded for an empty split.
        """
        for batch, _ in pack(self._examples(), self._config, self._config.batch_size, []):
            yield batch

    def _examples(self) -> Iterator[Example]:
        pairs = [self._corpus.pairs(self._split, language) for language in self._corpus.languages
                 if self._corpus.count(self._split, language)]
        order = [(of_language, i) for i in range(max(map(len, pairs), default=0)) for of_language in pairs if i < len(of_language)]
        for start in range(0, len(order), _CHUNK):
            texts = [of_language[i] for of_language, i in order[start:start + _CHUNK]]
            sides = (self._tokenizers.source.encode([source for source, _ in texts]),
                     self._tokenizers.target.encode([target for _, target in texts]))
            yield from (e for e in map(Example, itertools.count(start), *sides) if e.fits(self._config))


def source_batches(sentences: Sequence[str], tokenizer: Tokenizer, batch_size: int,
                   source_length: int) -> Iterator[tuple[list[int], dict[str, np.ndarray]]]:
    """Yields (indices of sentences, ids, segment_ids and positions `[batch_size, source_length]`), shortest sentences first.

    The last batch's surplus rows are empty. Raises UserError for a sentence that does not fit, before the first batch.
    """
    tokens = tokenizer.encode(sentences)
    for number, ids in enumerate(tokens, start=1):
        if len(ids) >= source_length:
            raise UserError(f"line {number} has {len(ids)} tokens; at most {source_length - 1} fit. Split the sentence, or pass "
                            f"--set input.source_length={len(ids) + 1}.")
    order = sorted(range(len(tokens)), key=lambda index: (len(tokens[index]), index))

    def batches():
        for start in range(0, len(order), batch_size):
            indices = order[start:start + batch_size]
            yield indices, _source_batch([tokens[index] for index in indices], batch_size, source_length)

    return batches()


def _source_batch(rows: list[np.ndarray], batch_size: int, source_length: int) -> dict[str, np.ndarray]:
    batch = {field: np.zeros((batch_size, source_length), np.int32) for field in SOURCE_FIELDS}
    for row, ids in enumerate(rows):
        length = len(ids) + 1
        batch["ids"][row, :length] = np.append(ids, SPECIAL_IDS["eos"])
        batch["segment_ids"][row, :length] = 1
        batch["positions"][row, :length] = np.arange(length)
    return batch


def _rows(ragged) -> list[np.ndarray]:
    """The rows of a ragged tensor, as views of its values."""
    return np.split(ragged.values.numpy(), ragged.row_splits.numpy()[1:-1])
