"""The schedule of training: its steps, and the intervals of logging, evaluation and checkpoints."""

from __future__ import annotations

import dataclasses
import threading

from lingvo_moe import ranges
from lingvo_moe.errors import UserError
from lingvo_moe.ranges import COUNT, COUNT_OR_0, SHARE_BELOW_1, Range


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingSchedule:
    """How long to train, and the intervals of logging, evaluation and checkpoints, all in steps.

    Attributes:
      steps: the total number of steps.
      seed: of the weights and of all random numbers in a step.
      log_every: interval of scalars for TensorBoard.
      evaluate_every: interval of evaluations of the validation loss; 0 for never.
      evaluation_batches: the maximal number of batches of an evaluation.
      checkpoint_every: interval of checkpoints; the last step has one as well.
      keep: the number of checkpoints to keep.
      steps_per_loop: steps in one call of the engine, which on a TPU do not return to the host; divides the intervals.
      max_skipped: training stops after this many skipped steps in a row, see `steps`.
      ema_decay: the decay per step of a moving average of the weights, for instance 0.999; 0 for none. Validation
        losses and whatever reads a checkpoint's weights use the average. It costs the memory of one more copy of the
        weights.
      grace_seconds: the maximal time from SIGTERM or SIGHUP to the end of the process; it must suffice for the step in
        progress and a checkpoint.
    """

    steps: int = 1_000_000
    seed: int = 0
    log_every: int = 10
    evaluate_every: int = 500
    evaluation_batches: int = 16
    checkpoint_every: int = 500
    keep: int = 3
    steps_per_loop: int = 1
    max_skipped: int = 10
    ema_decay: float = 0.0
    grace_seconds: float = 25.0

    def __post_init__(self):
        counts = (
            "steps",
            "log_every",
            "evaluation_batches",
            "checkpoint_every",
            "keep",
            "steps_per_loop",
            "max_skipped",
        )
        others = {
            "seed": COUNT_OR_0,
            "evaluate_every": COUNT_OR_0,
            "grace_seconds": Range(0, threading.TIMEOUT_MAX),
            "ema_decay": SHARE_BELOW_1,
        }
        ranges.check("training.", self, dict.fromkeys(counts, COUNT) | others)
        for name in ("log_every", "evaluate_every", "checkpoint_every"):
            if getattr(self, name) % self.steps_per_loop:
                raise UserError(
                    f"training.{name} is {getattr(self, name)}; it must be a multiple of training.steps_per_loop, "
                    f"{self.steps_per_loop}: a loop of steps cannot be interrupted."
                )

    def steps_of_next_call(self, step: int) -> int:
        """Returns the number of steps of the engine's next call: from `step` to the end of its loop, or of training."""
        return min(self.steps_per_loop - step % self.steps_per_loop, self.steps - step)
