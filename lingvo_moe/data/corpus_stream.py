"""The examples of a corpus: its pairs, sampled, read and tokenised.

Training examples are a tf.data pipeline that prefetches in the background. Example n is a pure function of (seed, n):
see `mixture`.
"""

from __future__ import annotations

import functools
import itertools
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from lingvo_moe.data.batching import Example, InputConfig, Readers
from lingvo_moe.data.corpus import Corpus
from lingvo_moe.data.mixture import Mixture
from lingvo_moe.data.name_substitution import NameSubstitution
from lingvo_moe.data.pair_languages import PairLanguages, languages_of_readers
from lingvo_moe.data.sentence_balance import PairList, balance_sentences
from lingvo_moe.data.tokenizer import SIDES, Tokenizer
from lingvo_moe.errors import UserError
from lingvo_moe.lazy import tf

# Of few examples at a time, the calls of NumPy and TensorFlow take longer than the work.
_CHUNK = 1024  # examples tokenised at a time, by all shards together
_MIN_CHUNK = 128  # by one shard
_PREFETCHED_CHUNKS = 2
_END_OF_STREAM = 1 << 62
_NO_TOKENS = np.zeros(0, np.int32)


class TrainPairs:
    """The training pairs of a corpus; the protocol `pipeline.Stream`.

    Attributes:
      identity: what decides which pair is example n: corpus, tokenizers, temperature, seed, sentence balance, name
        substitution.
      reader_fingerprints: see `batching.Readers.fingerprints`.
    """

    def __init__(
        self, corpus: str | pathlib.Path, tokenizers: str | pathlib.Path, config: InputConfig, in_graph: bool = True
    ):
        """Opens both directories and reads the training pairs.

        Args:
          corpus: its directory.
          tokenizers: their directory.
          config: what decides the stream.
          in_graph: whether a tf.data pipeline reads and tokenises, with the same result as without TensorFlow.

        Raises:
          UserError: either is missing or corrupt, or the corpus has no training pair.
        """
        opened = Corpus.open_to_train(corpus)
        self._in_graph = in_graph
        self._readers, self.reader_fingerprints = _open_readers(opened, config, tokenizers)
        labels = opened.languages_of("train")
        self._languages = languages_of_readers(config, self._readers, labels, f"{opened.directory}, training")
        self._languages.warn()
        self._pairs = _open_pairs(opened, config.sentence_balance, self._languages)
        self._prefixes = _prefixes_of(self._languages, opened.languages)
        self._mixture = Mixture(tuple(map(len, self._pairs)), config.temperature, config.seed)
        self.identity = (opened.fingerprint, list(self.reader_fingerprints), config.temperature, config.seed)
        if any(languages := (config.source_language, config.target_language)):
            self.identity += ("languages", *languages)
        if config.sentence_balance:
            self.identity += (config.sentence_balance,)
        self._substitute: NameSubstitution | None = None
        if config.name_substitution:
            self._substitute = NameSubstitution(self._pairs, config.name_substitution, config.seed)
            self.identity += ("names", config.name_substitution)

    def examples(self, first: int, step: int) -> Iterator[Example]:
        """Yields the examples first, first + step, ... of one of `step` shards."""
        chunk = max(_CHUNK // step, _MIN_CHUNK)
        if self._in_graph:
            return self._examples_in_graph(first, step, chunk)
        starts = itertools.count(first, step * chunk)
        return itertools.chain.from_iterable(
            self.examples_at(np.arange(start, start + step * chunk, step)) for start in starts
        )

    def _examples_in_graph(self, first: int, step: int, chunk: int) -> Iterator[Example]:
        failures: list[Exception] = []

        def call(function: Callable, argument: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
            def recorded(value):
                try:
                    return function(value)
                except Exception as error:
                    failures.append(error)
                    raise

            return tf.numpy_function(recorded, [argument], dtype)

        readers = {side: reader.in_graph(call) for side, reader in self._readers.items()}

        # AutoGraph would leave a source file in the temporary directory for each process: commands end without
        # Python's clean-up.
        @tf.autograph.experimental.do_not_convert
        def tokenize(indices):
            texts = call(self._read_texts, indices, tf.string)
            texts.set_shape([None, 3])
            tokens = {side: reader.tokenize(texts[:, SIDES.index(side)]) for side, reader in readers.items()}
            return indices, texts[:, 2], tokens

        options = tf.data.Options()
        # There is nothing to tune, and closing an iterator waits for the tuner's thread, which after some minutes wakes
        # up only once a minute: that would block Python, once for each shard.
        options.autotune.enabled = False
        chunks = (
            tf.data.Dataset.range(first, _END_OF_STREAM, step).batch(chunk, drop_remainder=True).with_options(options)
        )
        op_error = tf.errors.OpError  # looked up now: where Python ends before this iterator, TensorFlow is gone
        try:
            for indices, languages, tokens in chunks.map(tokenize, num_parallel_calls=1).prefetch(_PREFETCHED_CHUNKS):
                rows = {side: _rows(ragged) for side, ragged in tokens.items()}
                yield from _examples(indices.numpy().tolist(), self._in_languages(languages.numpy(), rows))
        except op_error as error:
            # TensorFlow wraps the error of a Python function into a page of its own.
            raise (failures[0] if failures else error) from None

    def examples_at(self, indices: np.ndarray) -> Iterator[Example]:
        """Returns an iterator of the examples `indices` `[N]`."""
        texts = self._read_texts(indices)
        tokens = {
            side: reader.encode([text.decode() for text in texts[:, SIDES.index(side)]])
            for side, reader in self._readers.items()
        }
        return _examples(indices.tolist(), self._in_languages(texts[:, 2], tokens))

    def _in_languages(self, languages: np.ndarray, tokens: Mapping[str, Sequence]) -> Mapping[str, Sequence]:
        """Returns the tokens of each side, which begin with a language, if the tokenizers have some.

        Args:
          languages: the last column of `_read_texts`.
          tokens: without it.
        """
        if not any(self._prefixes):
            return tokens
        return _with_prefixes([self._prefixes[int(language)] for language in languages], tokens)

    def _read_texts(self, indices: np.ndarray) -> np.ndarray:
        """Returns source and target of the examples `indices` `[N]`, and the number of the language: `[N, 3] bytes`."""
        languages, numbers = (part.tolist() for part in self._mixture.sample(indices))
        pairs: Iterable[tuple[str, str]] = (
            self._pairs[language][number] for language, number in zip(languages, numbers, strict=True)
        )
        if self._substitute:
            pairs = (self._substitute(number, *pair) for number, pair in zip(indices.tolist(), pairs, strict=True))
        rows = [
            (*(text.encode() for text in self._languages.source_and_target(*pair)), b"%d" % language)
            for pair, language in zip(pairs, languages, strict=True)
        ]
        return np.array(rows, dtype=object)


class HeldOutPairs:
    """The pairs of a held-out split; the protocol `pipeline.HeldOut`."""

    def __init__(
        self,
        corpus: str | pathlib.Path,
        tokenizers: str | pathlib.Path,
        config: InputConfig,
        split: str,
        languages: Sequence[str],
        max_pairs: int | None,
    ):
        """Opens both directories and reads the pairs of a split; see `pipeline.EvalInput`."""
        opened = Corpus.open(corpus)
        self._config = config
        self._readers, _ = _open_readers(opened, config, tokenizers)
        chosen = dict.fromkeys(languages or opened.languages_of(split))
        self._languages = languages_of_readers(config, self._readers, chosen, f"{opened.directory}, {split}")
        labels = list(self._languages.by_label)
        self._prefixes = _prefixes_of(self._languages, labels)
        self._pairs = [opened.sample(split, label, max_pairs) for label in labels]

    def examples(self, shuffled: bool) -> Iterator[Example]:
        """Yields one pair of each language, then a second of each, and so on; equal targets have equal numbers."""
        numbered = ((number, *place) for number, place in enumerate(self._in_turn()))
        if not shuffled:
            return self._tokenized(
                (number, language, *self._pair(language, index)) for number, language, index in numbered
            )
        others = self._other_sources
        return self._tokenized(
            (number, language, self._pair(language, others[language][index])[0], self._pair(language, index)[1])
            for number, language, index in numbered
            if index in others[language]
        )

    def _in_turn(self) -> Iterator[tuple[int, int]]:
        """Yields the numbers of a language and of one of its pairs, a pair of each language in turn."""
        for index in range(max(map(len, self._pairs), default=0)):
            yield from ((language, index) for language, pairs in enumerate(self._pairs) if index < len(pairs))

    def _pair(self, language: int, index: int) -> tuple[str, str]:
        """Returns (source, target) of a pair."""
        return self._languages.source_and_target(*self._pairs[language][index])

    @functools.cached_property
    def _other_sources(self) -> list[dict[int, int]]:
        """For each language, the pair whose source a target gets, for all pairs that fit into a row.

        It is half of these pairs away. The shuffled pairs fit, too. (Rows have a limit for each side.)
        """
        others = []
        for language, pairs in enumerate(self._pairs):
            texts = [(number, language, *self._pair(language, number)) for number in range(len(pairs))]
            fitting = [example.stream_index for example in self._tokenized(texts) if self._config.fits(example)]
            half = len(fitting) // 2
            rotated = [*fitting[-half:], *fitting[:-half]]
            others.append(dict(zip(fitting, rotated)) if half else {})
        return others

    def _tokenized(self, texts: Iterable[tuple[int, int, str, str]]) -> Iterator[Example]:
        """Yields the example of each (number, language, source, target)."""
        texts = iter(texts)
        while chunk := list(itertools.islice(texts, _CHUNK)):
            numbers, languages, *sides = zip(*chunk, strict=True)
            sentences: dict[str, tuple[str, ...]] = dict(zip(SIDES, sides, strict=True))
            tokens = {side: reader.encode(sentences[side]) for side, reader in self._readers.items()}
            yield from _examples(numbers, _with_prefixes([self._prefixes[language] for language in languages], tokens))


def _open_readers(corpus: Corpus, config: InputConfig, tokenizers: str | pathlib.Path) -> Readers:
    """Opens what reads the pairs of a corpus; raises UserError for recordings where the model reads source texts."""
    readers = config.open_readers(corpus.directory, tokenizers)
    if corpus.manifest.get("audio") and isinstance(readers.by_side.get("source"), Tokenizer):
        raise UserError(
            f"{corpus.directory}: a corpus of recordings, but the model reads texts. Give a --corpus of "
            f"tools.build_corpus, or a --model that recognises speech, such as conformer.Small."
        )
    return readers


def _open_pairs(corpus: Corpus, sentence_balance: float, chosen: PairLanguages) -> list[PairList]:
    """Returns the list that the training examples of each language of the corpus are drawn from."""
    languages = list(chosen.by_label)
    pairs = [corpus.pairs("train", language) for language in languages]
    lists = balance_sentences(pairs, sentence_balance) if sentence_balance else pairs
    by_language = dict(zip(languages, lists, strict=True))
    return [by_language.get(language, ()) for language in corpus.languages]


def _prefixes_of(languages: PairLanguages, labels: Iterable[str]) -> list[dict[str, tuple[int, ...]]]:
    """Returns for each label the ids that the texts of both sides begin with, by side; none if it is left out."""
    return [languages.prefixes(label) if label in languages.by_label else {} for label in labels]


def _with_prefixes(
    prefixes: Sequence[Mapping[str, tuple[int, ...]]], tokens: Mapping[str, Sequence[np.ndarray]]
) -> Mapping[str, list]:
    """Returns the tokens of each side, of which those of an example begin with its prefix."""
    return {
        side: [
            np.concatenate([np.array(prefix[side], np.int32), ids]) if side in prefix else ids
            for prefix, ids in zip(prefixes, of_side, strict=True)
        ]
        for side, of_side in tokens.items()
    }


def _examples(indices: Iterable[int], tokens: Mapping[str, Iterable[np.ndarray]]) -> Iterator[Example]:
    """Yields examples from the tokens of each side; a language model's have an empty source."""
    sources, targets = (tokens.get(side, itertools.repeat(_NO_TOKENS)) for side in SIDES)
    return map(Example, indices, sources, targets)


def _rows(ragged) -> list[np.ndarray]:
    """Returns the rows of a ragged tensor, as views of its values."""
    return np.split(ragged.values.numpy(), ragged.row_splits.numpy()[1:-1])
