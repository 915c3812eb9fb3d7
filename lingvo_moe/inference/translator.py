"""Translation with a trained model: sentences in, the n best translations of each out."""

from __future__ import annotations

import dataclasses
import logging
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np

from lingvo_moe.data.pipeline import source_batches
from lingvo_moe.engines.base import Engine
from lingvo_moe.experiment import Experiment
from lingvo_moe.inference.sentence_splitting import segment
from lingvo_moe.inference.trained_weights import trained_weights
from lingvo_moe.sharding.layout import Spec
from lingvo_moe.utils import progress

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Translation:
    """One hypothesis.

    Attributes:
      text: the translation.
      score: its length-normalised log-probability; of a line that was translated in parts, that of the least probable
        part. Low scores mark doubtful translations.
      parts: the pairs of token ids, (sentence, translation), that the model read and wrote, without eos: one, or one
        for each part; none of an empty line.
    """

    text: str
    score: float
    parts: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()


class Translator:
    """Translates with the newest checkpoint of a log directory.

    Attributes:
      step: the training step of the checkpoint.
    """

    def __init__(self, name: str, experiment: Experiment, engine: Engine, logdir: str | pathlib.Path):
        """Compiles the beam search and restores the weights.

        Args:
          name: the registered name of the model.
          experiment: its experiment.
          engine: where to decode.
          logdir: the log directory that it was trained in.

        Raises:
          UserError: no tokenizer or one too large for the model, no checkpoint or one of another model.
        """
        self._experiment = experiment
        self._tokenizers = experiment.open_tokenizers()
        shape = (experiment.decoding_batch, experiment.texts.source_length)
        specs = {field: Spec(shape, "int32", "BS") for field in ("ids", "segment_ids", "positions")}
        with trained_weights(name, experiment, logdir) as restore:
            self._decoding = engine.decoding(experiment.steps, specs, experiment.search)
            self.step, theta = restore(self._decoding.shardings)
        self._decoding.load(theta)

    def fits(self, sentences: Sequence[str]) -> list[bool]:
        """Returns for each sentence whether it is short enough: fewer than `input.source_length` tokens."""
        limit = self._experiment.texts.source_length
        return [len(tokens) < limit for tokens in self._tokenizers.source.encode(sentences)]

    def translate(self, sentences: Sequence[str]) -> list[list[Translation]]:
        """Returns the translations of each sentence, best first. Translations of an empty sentence are empty.

        A line of `input.source_length` tokens or more is translated in parts, see `sentence_splitting`; a warning names
        the line if a single sentence of it is too long and loses its end.
        """
        parts, lines = self._segmented(sentences)
        results: list[list[Translation]] = [[]] * len(parts)
        batches = source_batches(
            parts, self._tokenizers.source, self._experiment.decoding_batch, self._experiment.texts.source_length
        )
        with progress.bar("translating", len(parts), "sentences") as advance:
            for indices, source in batches:
                for index, translations in zip(indices, self._translate_batch(source)):
                    results[index] = translations
                advance(len(indices))
        return [_joined(results[line.start : line.stop]) for line in lines]

    def _segmented(self, sentences: Sequence[str]) -> tuple[list[str], list[range]]:
        """Returns texts that fit the model, and for each sentence which of them are its parts."""
        limit = self._experiment.texts.source_length - 1
        parts, lines = [], []
        for number, (sentence, fits) in enumerate(zip(sentences, self.fits(sentences)), start=1):
            texts, truncated = ([sentence], False) if fits else segment(sentence, self._count_tokens, limit)
            if truncated:
                _log.warning(
                    "line %d: a sentence has more than %d tokens; its end is not translated. Split it, or pass "
                    "--set input.source_length=N.",
                    *(number, limit),
                )
            lines.append(range(len(parts), len(parts) + len(texts)))
            parts += texts
        return parts, lines

    def _count_tokens(self, text: str) -> int:
        return len(self._tokenizers.source.encode([text])[0])

    def _translate_batch(self, source: dict[str, np.ndarray]) -> Iterator[list[Translation]]:
        """Yields the translations of each row."""
        hypotheses = self._decoding.decode(source)
        ids, scores, lengths = (np.asarray(hypotheses[field]) for field in ("ids", "scores", "lengths"))
        for row, tokens in enumerate(np.count_nonzero(source["segment_ids"], axis=1)):
            sentence = tuple(map(int, source["ids"][row, : tokens - 1]))
            translations = self._translations(sentence, ids[row], scores[row], lengths[row])
            # An empty sentence is an end-of-sentence token alone, for which a model invents a translation.
            yield translations if tokens > 1 else [Translation("", 0.0)] * len(translations)

    def _translations(
        self, sentence: tuple[int, ...], ids: np.ndarray, scores: np.ndarray, lengths: np.ndarray
    ) -> list[Translation]:
        rows = [row[:length].tolist() for row, length in zip(ids, lengths)]
        texts, eos = self._tokenizers.target.decode(rows), self._tokenizers.target.eos_id
        return [
            Translation(text, float(score), ((sentence, tuple(token for token in row if token != eos)),))
            for text, score, row in zip(texts, scores, rows)
        ]


def _joined(parts: Sequence[list[Translation]]) -> list[Translation]:
    """Returns the translations of a line from those of its parts: the best of each, then the second best of each."""
    if len(parts) == 1:
        return parts[0]
    return [
        Translation(
            " ".join(part.text for part in ranked),
            min(part.score for part in ranked),
            tuple(pair for part in ranked for pair in part.parts),
        )
        for ranked in zip(*parts, strict=True)
    ]
