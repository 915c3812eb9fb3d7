"""Translation with a trained model: sentences in, the n best translations of each out."""

from __future__ import annotations

import collections
import copy
import hashlib
import logging
import pathlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from lingvo_moe import definitions, tree
from lingvo_moe.data.pipeline import source_batches
from lingvo_moe.data.tokenizer import Tokenizers, is_english
from lingvo_moe.engines.base import Engine
from lingvo_moe.errors import UserError
from lingvo_moe.experiment import Experiment
from lingvo_moe.inference.configured import configured
from lingvo_moe.inference.lines.line_reader import Line, LineReader
from lingvo_moe.inference.lines.translation import Translation
from lingvo_moe.inference.trained_weights import trained_weights
from lingvo_moe.sharding.layout import DeviceMesh
from lingvo_moe.utils import progress

_logger = logging.getLogger(__name__)
# Sentences of like length are batched within a chunk. The batches of held-out sentences of m4.Pocket, in random order,
# have 10 % more steps with chunks of 32 than if the whole file was sorted, and 22 % with chunks of 16. The first chunks
# are smaller, so that a user sees translations, and a journal has some, within seconds.
_FIRST_BATCHES, _CHUNK_BATCHES = 2, 32
_MOST_HASHED = 2**16  # elements of a weight


class Translator:
    """Translates with the newest checkpoint of a log directory.

    Attributes:
      name: the registered name of the model.
      experiment: its experiment.
      step: the training step of the checkpoint.
      digest: a hash that differs between trained weights, and between tokenizers.
    """

    def __init__(
        self,
        name: str,
        experiment: Experiment,
        engine: Engine,
        logdir: str | pathlib.Path,
        copy_english: bool = False,
    ):
        """Compiles the beam search and restores the weights.

        Args:
          name: the registered name of the model.
          experiment: its experiment.
          engine: where to decode.
          logdir: the log directory that it was trained in.
          copy_english: whether texts that are English already are copied; of a model whose tokenizers have no language.

        Raises:
          UserError: the model does not translate, as `Experiment.tokenizers_of_languages`, no checkpoint or one of
            another model.
        """
        if not experiment.translates:
            raise UserError(
                f"{name} does not translate; `inference.held_out_loss`, `recognizer` and `segmenter` are for models of "
                "other kinds."
            )
        self.name, self.experiment, self._copy_english = name, experiment, copy_english
        self._read_with(experiment.tokenizers_of_languages())
        with trained_weights(name, experiment, logdir) as restore:
            self._decoding = engine.decoding(experiment.steps, experiment.decoding_specs(), experiment.search)
            self.step, theta = restore(self._decoding.shardings)
        self.digest = _digest(theta, self._tokenizers)
        self._decoding.load(theta)

    def between(self, source_language: str, target_language: str) -> Translator:
        """Returns a translator between other languages, with the same weights and program.

        Args:
          source_language: of the texts, by its name among those of the tokenizers, such as `deu_Latn`; may be empty
            where sources begin with the language of the translation alone.
          target_language: of their translations.

        Raises:
          UserError: the tokenizers do not have such a language.
        """
        other = copy.copy(self)
        other.experiment = self.experiment.in_languages({"source": source_language, "target": target_language})
        other._read_with(self._tokenizers.in_languages({"source": source_language, "target": target_language}))
        return other

    def _read_with(self, tokenizers: Tokenizers):
        """Sets what reads and writes texts."""
        self._tokenizers, language = tokenizers, tokenizers.target.language
        self._reader = LineReader(
            tokenizers.source,
            self.experiment.texts.source_length - 1,
            tokenizers.target if self._copy_english and not language else None,
            self.experiment.reread_below,
            into_english=is_english(language),
        )

    def fits(self, sentences: Sequence[str]) -> list[bool]:
        """Returns for each sentence whether it is short enough: fewer than `input.source_length` tokens.

        Raises:
          UserError: as `stream`.
        """
        definitions.check_texts("sentences", sentences)
        return self._reader.fits(sentences)

    def translate(self, sentences: Sequence[str]) -> list[list[Translation]]:
        """Returns the translations of each sentence, best first; see `stream`."""
        return [translations for chunk in self.stream(sentences) for translations in chunk]

    def stream(self, sentences: Sequence[str], start: int = 0) -> Iterator[list[list[Translation]]]:
        """Yields the translations of each sentence, best first, some sentences at a time, in order.

        Equal sentences are translated once. Translations of an empty sentence are empty. What is between the
        `line_parts` is copied, and so are symbols at the ends that the source tokenizer does not know, see
        `unknown_symbols`. Parts of `input.source_length` tokens or more, and those of many sentences, are translated
        sentence by sentence, see `sentence_splitting`. The marks of `accelerators` are removed; `capitals` are read in
        lower case, too, and addresses as `short_addresses`, as is what `kept_text.required` finds where a translation
        has lost some of it. Texts of less confidence than `reread_below` are read in other ways, too, see
        `variants`. Texts in English are copied, if that was chosen. Of several translations, equal ones are
        left out.

        Args:
          sentences: the lines.
          start: how many of them to leave out, at the beginning.

        Raises:
          UserError: this is no list of texts.
        """
        definitions.check_texts("sentences", sentences)
        lines = self._reader.lines(sentences[start:])
        uses = collections.Counter(text for line in lines for text in line.inputs)
        if (different := len(set(sentences[start:]))) < len(lines):
            plural = "s" * (different > 1)
            _logger.info("%d lines have %d different sentence%s, translated once each.", len(lines), different, plural)
        if copied := sum(line.is_copied for line in lines):
            _logger.info("%d of %d lines are in English already, and are copied.", copied, len(lines))
        known: dict[str, list[Translation]] = {}
        with progress.bar("translating", len(uses), "sentences") as advance:
            for chunk in _chunks(lines, self.experiment.decoding_batch):
                new = list(dict.fromkeys(text for line in chunk for text in line.inputs if text not in known))
                known.update(zip(new, self._translate_texts(new, advance), strict=True))
                again = [text for line in chunk for text in line.inputs_read_again(known)]
                new = list(dict.fromkeys(text for text in again if text not in known))
                known.update(zip(new, self._translate_texts(new), strict=True))
                yield [line.translations(known) for line in chunk]
                uses.subtract(text for line in chunk for text in line.inputs)
                known = {text: translations for text, translations in known.items() if uses[text]}

    def _translate_texts(
        self, texts: Sequence[str], advance: Callable[[int], None] = lambda count: None
    ) -> list[list[Translation]]:
        """Returns the translations of each text, which fits the model, best first."""
        results: list[list[Translation]] = [[]] * len(texts)
        batches = source_batches(
            texts, self._tokenizers.source, self.experiment.decoding_batch, self.experiment.texts.source_length
        )
        for indices, source in batches:
            for index, translations in zip(indices, self._translate_batch(source)):
                results[index] = translations
            advance(len(indices))
        return results

    def _translate_batch(self, source: dict[str, np.ndarray]) -> Iterator[list[Translation]]:
        """Yields the translations of each row."""
        first = self._tokenizers.target.language_id
        first_ids = {} if first is None else {"first_ids": np.full(len(source["ids"]), first, np.int32)}
        hypotheses = self._decoding.decode({**source, **first_ids})
        ids, scores, lengths = (np.asarray(hypotheses[field]) for field in ("ids", "scores", "lengths"))
        empty = len(self._tokenizers.source.prefix) + 1  # the language, and eos
        for row, tokens in enumerate(np.count_nonzero(source["segment_ids"], axis=1)):
            sentence = tuple(map(int, source["ids"][row, : tokens - 1]))
            translations = self._translations(sentence, ids[row], scores[row], lengths[row])
            # An empty sentence is an end-of-sentence token alone, for which a model invents a translation.
            yield translations if tokens > empty else [Translation("", 0.0)] * len(translations)

    def _translations(
        self, sentence: tuple[int, ...], ids: np.ndarray, scores: np.ndarray, lengths: np.ndarray
    ) -> list[Translation]:
        rows = [row[:length].tolist() for row, length in zip(ids, lengths)]
        texts, eos = self._tokenizers.target.decode(rows), self._tokenizers.target.eos_id
        return [
            Translation(
                text,
                float(score),
                ((sentence, tuple(token for token in row if token != eos)),),
                self.experiment.search.confidence(float(score), len(row)),
                truncated=eos not in row,
            )
            for text, score, row in zip(texts, scores, rows)
        ]


def load(
    logdir: str | pathlib.Path,
    name: str | None = None,
    assignments: Sequence[str] = (),
    mesh: DeviceMesh = DeviceMesh(),
    platform: str | None = None,
    copy_english: bool = False,
) -> Translator:
    """Returns a translator with the newest checkpoint of a log directory; seconds, or a minute without program cache.

    Args:
      logdir: that of `train`.
      name: the registered name of the model; None for that of the log directory's `hyperparameters.json`, with the
        hyperparameters that it has.
      assignments: other hyperparameters, as `--set` has them: `["search.beam_size=8"]`.
      mesh: of the devices to translate on.
      platform: `cpu`, `gpu` or `tpu`; None for what JAX prefers.
      copy_english: whether texts that are English already are copied.

    Raises:
      UserError: as `Translator`; or no name and no file, an unknown hyperparameter, devices that are not there.
    """
    name, experiment, engine = configured(logdir, name, assignments, mesh, platform)
    return Translator(name, experiment, engine, logdir, copy_english)


def _digest(theta: dict, tokenizers: Tokenizers) -> str:
    """Returns the hash of the small weights and the tokenizers: no two trainings have the same scales of a norm."""
    found = hashlib.sha256(tokenizers.source.model + tokenizers.target.model)
    if tokenizers.source.names_target:  # with one model, sources may begin with a piece before the language, or not
        found.update(tokenizers.source.before_language.encode())
    for path, weight in tree.flatten(theta).items():
        if weight.size <= _MOST_HASHED:
            found.update(path.encode() + np.asarray(weight).tobytes())
    return found.hexdigest()


def _chunks(lines: Sequence[Line], batch: int) -> Iterator[list[Line]]:
    """Yields consecutive lines whose new texts fill a number of batches at most, or one longer line.

    That number doubles from chunk to chunk, from `_FIRST_BATCHES` to `_CHUNK_BATCHES`.
    """
    seen: set[str] = set()
    chunk, new, batches = [], 0, min(_FIRST_BATCHES, _CHUNK_BATCHES)
    for line in lines:
        texts = set(line.inputs) - seen
        if chunk and new + len(texts) > batches * batch:
            yield chunk
            chunk, new, batches = [], 0, min(2 * batches, _CHUNK_BATCHES)
        chunk.append(line)
        seen |= texts
        new += len(texts)
    if chunk:
        yield chunk
