"""Explains translations: which experts take each token of a sentence and of its translation, layer by layer."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lingvo_moe.data.batching import Example, PackedRows
from lingvo_moe.engines.base import Engine
from lingvo_moe.experiment import Experiment
from lingvo_moe.inference.lines.translation import Translation
from lingvo_moe.inference.trained_weights import trained_weights
from lingvo_moe.training import compiling
from lingvo_moe.utils import progress


class _Part(NamedTuple):
    """A sentence and its translation: one of a line's parts."""

    line: int
    part: int
    source: np.ndarray
    target: np.ndarray


class Explainer:
    """Runs a model on translations that it has made.

    The experts are those that the search used, unless the routing of a token depends on the rest of its batch: with
    expert choice, or a finite `inference_capacity_factor`.
    """

    def __init__(self, name: str, experiment: Experiment, engine: Engine, logdir: str | pathlib.Path):
        """Compiles the program; the arguments are those of `translator.Translator`.

        Raises:
          UserError: no layer of the model has experts, or there is no tokenizer.
        """
        self._name, self._experiment, self._logdir = name, experiment, logdir
        self._tokenizers = experiment.tokenizers_of_languages()
        # A row holds one pair, the longest translation of the search included.
        self._input = dataclasses.replace(
            experiment.texts,
            batch_size=experiment.decoding_batch,
            target_length=experiment.search.max_length + 1,
            packing=False,
        )
        with compiling.announced(f"the explanation of {name}", experiment, engine.platform, compiling.UNLESS_CACHED):
            self._program = engine.compile(experiment.steps.explain(self._input.specs()))

    def explain(self, translations: Sequence[Translation], step: int) -> Iterator[dict[str, Any]]:
        """Yields an explanation for each part of each translation: one, or several of a line that was split.

        An explanation is JSON: `line` and `part`, from 1; `source`, the tokens that the encoder reads, and
        `translation`, those that the decoder reads, from `input.bos_id` on; and for each layer with experts,
        `encoder/2` or `decoder/2`, one list per token, `[expert, weight]` by falling weight.

        Args:
          translations: of lines, in order.
          step: of the checkpoint that made them.
        """
        with trained_weights(self._name, self._experiment, self._logdir, step) as restore:
            _, theta = restore(self._program.shardings("theta"))
        parts = [
            _Part(line, part, *(np.array(ids, np.int32) for ids in pair))
            for line, translation in enumerate(translations, start=1)
            for part, pair in enumerate(translation.parts, start=1)
        ]
        with progress.bar("explaining", len(parts), "sentences") as advance:
            for start in range(0, len(parts), self._input.batch_size):
                chunk = parts[start : start + self._input.batch_size]
                layers = self._run(theta, chunk)
                yield from (self._explanation(part, layers, row) for row, part in enumerate(chunk))
                advance(len(chunk))

    def _run(self, theta: dict, parts: Sequence[_Part]) -> dict[str, Mapping[str, np.ndarray]]:
        """Returns `experts` and `weights` by layer, one part a row."""
        rows = PackedRows(self._input, self._input.batch_size)
        for index, part in enumerate(parts):
            if not rows.add(Example(index, part.source, part.target)):
                raise AssertionError(f"line {part.line} does not fit a row, though it was translated")
        outputs = self._program({"theta": theta, "batch": rows.batch})
        return {
            f"{stack}/{number}": {name: np.asarray(value) for name, value in of_layer.items()}
            for stack, layers in sorted(outputs.items(), reverse=True)
            for number, of_layer in sorted(layers.items(), key=lambda item: int(item[0]))
        }

    def _explanation(self, part: _Part, layers: Mapping[str, Mapping[str, np.ndarray]], row: int) -> dict[str, Any]:
        tokens = {
            "source": [*self._tokenizers.source.pieces(part.source), "</s>"],
            "translation": self._tokenizers.target.pieces([self._input.bos_id, *part.target]),
        }
        explanation: dict[str, Any] = {"line": part.line, "part": part.part, **tokens}
        for layer, found in layers.items():
            read = tokens["source" if layer.startswith("encoder") else "translation"]
            experts, weights = (found[name][row, : len(read)] for name in ("experts", "weights"))
            explanation[layer] = [_choices(*token) for token in zip(experts, weights)]
        return explanation


def _choices(experts: np.ndarray, weights: np.ndarray) -> list[tuple[int, float]]:
    """Returns (expert, weight) of the choices of one token that were dispatched, largest weight first."""
    chosen = [(int(expert), round(float(weight), 4)) for expert, weight in zip(experts, weights) if weight]
    return sorted(chosen, key=lambda choice: -choice[1])
