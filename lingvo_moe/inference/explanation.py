"""Explains translations: which experts take each token of a sentence and of its translation, layer by layer."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lingvo_moe.data.batching import Example, PackedRows, input_specs
from lingvo_moe.engines.base import Engine
from lingvo_moe.errors import UserError
from lingvo_moe.experiment import Experiment
from lingvo_moe.steps import weight_specs
from lingvo_moe.training.checkpoint import Checkpoints
from lingvo_moe.utils import progress

_SIDES = {"encoder": "source", "decoder": "target"}


class Explainer:
    """Runs the newest checkpoint of a log directory on pairs of sentences."""

    def __init__(self, name: str, experiment: Experiment, engine: Engine, logdir: str | pathlib.Path):
        """Compiles the program and restores the weights.

        Args:
          name: the registered name of the model.
          experiment: its experiment.
          engine: where to run.
          logdir: the log directory that it was trained in.

        Raises:
          UserError: the model has no experts, no tokenizer or no checkpoint.
        """
        if not experiment.model.num_experts:
            raise UserError(f"--explain: {name} has no experts.")
        self._tokenizers = experiment.open_tokenizers()
        self._input = dataclasses.replace(experiment.input, batch_size=experiment.decoding_batch, packing=False)
        theta_specs = weight_specs(experiment.model.weights())
        checkpoints = Checkpoints(logdir)
        checkpoints.require(name, theta_specs)
        self._program = engine.load(experiment.steps.explain(input_specs(self._input)))
        _, self._theta = checkpoints.restore_theta(name, theta_specs, self._program.shardings("theta"))
        checkpoints.close()

    def explain(self, sources: Sequence[str], translations: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yields the explanation of each pair, in order.

        An explanation is JSON: `line`, from 1; `source` and `translation`, the tokens of each, which end with `</s>`;
        and by layer with experts, `encoder/2` or `decoder/2`, a list for each token of its experts, most important
        first: `[number, weight]`. A pair that does not fit the model's rows has `line` alone.
        """
        tokens = zip(self._tokenizers.source.encode(sources), self._tokenizers.target.encode(translations), strict=True)
        examples = [Example(line, *pair) for line, pair in enumerate(tokens, start=1)]
        with progress.bar("explaining", len(examples), "sentences") as advance:
            for start in range(0, len(examples), self._input.batch_size):
                chunk = examples[start : start + self._input.batch_size]
                fitting = [example for example in chunk if example.fits(self._input)]
                layers = self._run(fitting)
                rows = {example.stream_index: row for row, example in enumerate(fitting)}
                for example in chunk:
                    yield self._explanation(example, layers, rows.get(example.stream_index))
                advance(len(chunk))

    def _run(self, examples: Sequence[Example]) -> dict[str, Mapping[str, np.ndarray]]:
        """Returns `experts` and `weights` by layer, one pair a row."""
        rows = PackedRows(self._input, self._input.batch_size)
        for example in examples:
            rows.add(example)
        outputs = self._program({"theta": self._theta, "batch": rows.batch})
        return {
            f"{stack}/{number}": {name: np.asarray(value) for name, value in of_layer.items()}
            for stack, layers in outputs.items()
            for number, of_layer in sorted(layers.items(), key=lambda item: int(item[0]))
        }

    def _explanation(self, example: Example, layers: Mapping, row: int | None) -> dict[str, Any]:
        if row is None:
            return {"line": example.stream_index}
        explanation: dict[str, Any] = {
            "line": example.stream_index,
            "source": [*self._tokenizers.source.pieces(example.source), "</s>"],
            "translation": [*self._tokenizers.target.pieces(example.target), "</s>"],
        }
        lengths = {"source": len(example.source) + 1, "target": len(example.target) + 1}
        for layer, found in layers.items():
            length = lengths[_SIDES[layer.partition("/")[0]]]
            experts, weights = (found[name][row, :length] for name in ("experts", "weights"))
            explanation[layer] = [_choices(*token) for token in zip(experts, weights)]
        return explanation


def _choices(experts: np.ndarray, weights: np.ndarray) -> list[tuple[int, float]]:
    """Returns (expert, weight) of the choices of one token that were dispatched, largest weight first."""
    chosen = [(int(expert), round(float(weight), 4)) for expert, weight in zip(experts, weights) if weight]
    return sorted(chosen, key=lambda choice: -choice[1])
