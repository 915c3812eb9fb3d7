"""Perplexity of a language model on held-out text."""

from __future__ import annotations

import dataclasses
import math
import pathlib

from lingvo_moe.data.pipeline import EvalInput
from lingvo_moe.engines.base import Engine
from lingvo_moe.errors import UserError
from lingvo_moe.experiment import Experiment
from lingvo_moe.steps import weight_specs
from lingvo_moe.training.checkpoint import Checkpoints
from lingvo_moe.utils import progress


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """A language model's loss on held-out text.

    Attributes:
      step: the training step of the checkpoint.
      tokens: how many tokens were predicted, the end of each text included.
      cross_entropy: nats per token.
      left_out: how many texts are longer than a row.
    """

    step: int
    tokens: int
    cross_entropy: float
    left_out: int

    @property
    def perplexity(self) -> float:
        """The number of equally likely tokens that would be as hard to predict."""
        return math.exp(self.cross_entropy)


def compute(
    name: str, experiment: Experiment, engine: Engine, logdir: str | pathlib.Path, split: str = "test"
) -> Perplexity:
    """Predicts every text of a split once, with the newest checkpoint of `logdir`.

    Args:
      name: the registered name of the model.
      experiment: its experiment.
      engine: where to compute the loss.
      logdir: the log directory that it was trained in.
      split: `test` or `valid`.

    Raises:
      UserError: before anything is compiled, if there is no data, tokenizer or checkpoint, if no text of the split
        fits a row, or if the checkpoint is another model's.
    """
    experiment.open_tokenizers()
    held_out = EvalInput(experiment.corpus, experiment.tokenizers, experiment.input, split)
    if next(held_out.batches(), None) is None:
        raise UserError(_no_batch(experiment, split, held_out.num_rejected))
    theta_specs = weight_specs(experiment.model.weights())
    checkpoints = Checkpoints(logdir)
    checkpoints.require(name, theta_specs)
    evaluation = engine.evaluation(experiment.steps, experiment.batch_specs())
    step, theta = checkpoints.restore_theta(name, theta_specs, evaluation.shardings)
    checkpoints.close()
    evaluation.load(theta)
    nats = tokens = 0.0
    with progress.bar(f"evaluating on {split}", None, "batches") as advance:
        for batch in held_out.batches():
            metrics = evaluation.evaluate(batch)
            count = float(metrics["tokens"])
            nats, tokens = nats + float(metrics["cross_entropy"]) * count, tokens + count
            advance()
    return Perplexity(step, round(tokens), nats / tokens, held_out.num_rejected)


def _no_batch(experiment: Experiment, split: str, num_rejected: int) -> str:
    """Returns why a split has no batch."""
    if not num_rejected:
        return f"the corpus has no {split} texts; see its report.txt."
    return (
        f"none of the corpus's {num_rejected} {split} texts fits input.target_length={experiment.input.target_length}; "
        f"raise it with --set input.target_length=..."
    )
