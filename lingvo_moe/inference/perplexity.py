"""How well a language model predicts held-out text."""

from __future__ import annotations

import dataclasses
import math
import pathlib

from lingvo_moe.data.pipeline import EvalInput
from lingvo_moe.engines.pjrt import Engine
from lingvo_moe.errors import UserError
from lingvo_moe.experiment import Experiment
from lingvo_moe.steps import weight_specs
from lingvo_moe.training.checkpoint import Checkpoints
from lingvo_moe.utils import progress


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """What was measured.

    Attributes:
      step: how long the checkpoint had been trained.
      tokens: predicted, each text's end included.
      cross_entropy: nats per token.
      left_out: texts that are longer than a row.
    """

    step: int
    tokens: int
    cross_entropy: float
    left_out: int

    @property
    def perplexity(self) -> float:
        """The number of equally likely tokens that would be as hard to guess."""
        return math.exp(self.cross_entropy)


def measure(
    name: str, experiment: Experiment, engine: Engine, logdir: str | pathlib.Path, split: str = "test"
) -> Perplexity:
    """Predicts every text of a split once, with the newest checkpoint of `logdir`.

    Raises:
      UserError: no data or tokenizer, nothing in the split that fits a row, no checkpoint or one of another model; before
        anything is compiled.
    """
    experiment.open_tokenizers()
    held_out = EvalInput(experiment.corpus, experiment.tokenizers, experiment.input, split)
    if next(held_out.batches(), None) is None:
        raise UserError(_nothing(experiment, split, held_out.too_long))
    theta_specs = weight_specs(experiment.model.weights())
    checkpoints = Checkpoints(logdir)
    checkpoints.require(name, theta_specs)
    predict = engine.load(experiment.steps.evaluate(experiment.batch_specs()))
    step, theta = checkpoints.restore_theta(name, theta_specs, predict.shardings("theta"))
    checkpoints.close()
    nats = tokens = 0.0
    with progress.bar(f"predicting {split}", None, "batches") as advance:
        for batch in held_out.batches():
            metrics = predict({"theta": theta, "batch": batch})["metrics"]
            count = float(metrics["tokens"])
            nats, tokens = nats + float(metrics["cross_entropy"]) * count, tokens + count
            advance()
    return Perplexity(step, round(tokens), nats / tokens, held_out.too_long)


def _nothing(experiment: Experiment, split: str, too_long: int) -> str:
    """Why there is no batch."""
    if not too_long:
        return f"the corpus has no {split} texts; see its report.txt."
    return (
        f"none of the corpus's {too_long} {split} texts fits input.target_length={experiment.input.target_length}; "
        f"raise it with --set input.target_length=..."
    )
