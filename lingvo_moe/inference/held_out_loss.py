"""The loss of a model on held-out text: a language model's perplexity, and how much a translator reads its source."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from lingvo_moe.data.batching import Batch
from lingvo_moe.data.pipeline import EvalInput
from lingvo_moe.engines.base import Engine
from lingvo_moe.errors import UserError
from lingvo_moe.experiment import Experiment
from lingvo_moe.inference.trained_weights import trained_weights
from lingvo_moe.training.loss import total_loss
from lingvo_moe.utils import progress


@dataclasses.dataclass(frozen=True)
class HeldOutLoss:
    """A model's loss on held-out text.

    Attributes:
      step: the training step of the checkpoint.
      tokens: how many target tokens were predicted, the end of each text included.
      cross_entropy: nats per target token.
      shuffled_cross_entropy: the same with the sources of other sentences, for the same targets but those of languages
        with a single text that fits; None for a language model, and where each language has only one.
      left_out: how many texts are longer than a row.
    """

    step: int
    tokens: int
    cross_entropy: float
    shuffled_cross_entropy: float | None
    left_out: int

    @property
    def perplexity(self) -> float:
        """The number of equally likely tokens that would be as hard to predict; infinity beyond the range of floats."""
        try:
            return math.exp(self.cross_entropy)
        except OverflowError:
            return math.inf

    @property
    def source_gain(self) -> float | None:
        """Nats per target token that the right source saves; near 0, the model does not read the source."""
        return None if self.shuffled_cross_entropy is None else self.shuffled_cross_entropy - self.cross_entropy


def compute(
    name: str,
    experiment: Experiment,
    engine: Engine,
    logdir: str | pathlib.Path,
    split: str = "test",
    languages: Sequence[str] = (),
    max_pairs: int | None = None,
    step: int | None = None,
) -> HeldOutLoss:
    """Predicts every text of a split once, with the newest checkpoint of `logdir`, or that of `step`.

    Args:
      name: the registered name of the model.
      experiment: its experiment.
      engine: where to compute the loss.
      logdir: the log directory that it was trained in.
      split: `test` or `valid`.
      languages: which to predict; empty for all.
      max_pairs: of each language; None for all.
      step: see `trained_weights`.

    Raises:
      UserError: before anything is compiled, if there is no data, tokenizer or checkpoint, if no text of the split
        fits a row, or if the checkpoint is another model's.
    """
    experiment.check_tokenizers()
    held_out = EvalInput(experiment.corpus, experiment.tokenizers, experiment.input, split, languages, max_pairs)
    if next(held_out.batches(), None) is None:
        raise UserError(_no_batch(experiment, split, held_out.num_rejected))
    with trained_weights(name, experiment, logdir, step, f"the loss of {name}") as restore:
        evaluation = engine.evaluation(experiment.steps, experiment.batch_specs())
        step, theta = restore(evaluation.shardings)
    evaluation.load(theta)
    with progress.bar(f"evaluating on {split}", None, "batches") as advance:

        def evaluate(batch: Batch) -> Mapping[str, Any]:
            metrics = evaluation.evaluate(batch)
            advance()
            return metrics

        tokens, nats = total_loss(evaluate, held_out.batches())
        left_out = held_out.num_rejected
        others = held_out.batches(shuffled=True) if experiment.translates else ()
        other_tokens, other_nats = total_loss(evaluate, others)
    shuffled = other_nats / other_tokens if other_tokens else None
    return HeldOutLoss(step, round(tokens), nats / tokens, shuffled, left_out)


def _no_batch(experiment: Experiment, split: str, num_rejected: int) -> str:
    """Returns why a split has no batch."""
    if not num_rejected:
        return f"the corpus has no {split} texts; see its report.txt."
    return experiment.input.none_fits(f"the corpus's {num_rejected} {split} texts")
