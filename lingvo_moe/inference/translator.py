"""Translation with a trained model: sentences in, the n best translations of each out."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np

from lingvo_moe.data.pipeline import source_batches
from lingvo_moe.engines.base import Engine
from lingvo_moe.experiment import Experiment
from lingvo_moe.sharding.layout import Spec
from lingvo_moe.steps import weight_specs
from lingvo_moe.training.checkpoint import Checkpoints
from lingvo_moe.utils import progress


@dataclasses.dataclass(frozen=True)
class Translation:
    """One hypothesis: the text and its length-normalised log-probability."""

    text: str
    score: float


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
        shape = (experiment.decoding_batch, experiment.input.source_length)
        specs = {field: Spec(shape, "int32", "BS") for field in ("ids", "segment_ids", "positions")}
        theta_specs = weight_specs(experiment.model.weights())
        checkpoints = Checkpoints(logdir)
        checkpoints.require(name, theta_specs)
        self._decoding = engine.decoding(experiment.steps, specs, experiment.search)
        self.step, theta = checkpoints.restore_theta(name, theta_specs, self._decoding.shardings)
        checkpoints.close()
        self._decoding.load(theta)

    def fits(self, sentences: Sequence[str]) -> list[bool]:
        """Returns for each sentence whether it is short enough: fewer than `input.source_length` tokens."""
        limit = self._experiment.input.source_length
        return [len(tokens) < limit for tokens in self._tokenizers.source.encode(sentences)]

    def translate(self, sentences: Sequence[str]) -> list[list[Translation]]:
        """Returns the translations of each sentence, best first. Translations of an empty sentence are empty.

        Raises:
          UserError: a sentence longer than `input.source_length`, before anything is translated.
        """
        results: list[list[Translation]] = [[]] * len(sentences)
        batches = source_batches(
            sentences, self._tokenizers.source, self._experiment.decoding_batch, self._experiment.input.source_length
        )
        with progress.bar("translating", len(sentences), "sentences") as advance:
            for indices, source in batches:
                for index, translations in zip(indices, self._translate_batch(source)):
                    results[index] = translations
                advance(len(indices))
        return results

    def _translate_batch(self, source: dict[str, np.ndarray]) -> Iterator[list[Translation]]:
        """Yields the translations of each row."""
        hypotheses = self._decoding.decode(source)
        ids, scores, lengths = (np.asarray(hypotheses[field]) for field in ("ids", "scores", "lengths"))
        for row, tokens in enumerate(np.count_nonzero(source["segment_ids"], axis=1)):
            translations = self._translations(ids[row], scores[row], lengths[row])
            # An empty sentence is an end-of-sentence token alone, for which a model invents a translation.
            yield translations if tokens > 1 else [Translation("", 0.0)] * len(translations)

    def _translations(self, ids: np.ndarray, scores: np.ndarray, lengths: np.ndarray) -> list[Translation]:
        texts = self._tokenizers.target.decode([row[:length].tolist() for row, length in zip(ids, lengths)])
        return [Translation(text, float(score)) for text, score in zip(texts, scores)]
