"""Learning-rate schedules."""

from __future__ import annotations

import dataclasses

from lingvo_moe import ranges
from lingvo_moe.lazy import tf
from lingvo_moe.ranges import ABOVE_0, COUNT, COUNT_OR_0


@dataclasses.dataclass(frozen=True, kw_only=True)
class InverseSquareRoot:
    """`peak_value / sqrt(max(step / decay_after, 1))`, with optional linear warm-up and linear cool-down.

    GShard appendix A.2, "1.0 learning rate with square root decay after 10k training steps", is the default: 1 /
    sqrt(max(step, 10,000)), so 0.01 for ten thousand steps, then decreasing.

    Attributes:
      peak_value: the highest rate, as in Optax's schedules; above 0. A warm-up that is longer than `decay_after` ends
        in the decay, and does not reach it.
      decay_after: the number of steps before the decay begins.
      warmup_steps: the rate increases linearly from near zero over this many steps; 0 for no warm-up.
      cooldown_after, cooldown_steps: from step `cooldown_after` on, over `cooldown_steps` steps, the rate decreases
        linearly to a tenth of the schedule, and stays there; 0 steps for no cool-down. Short runs of a known length end
        with a lower loss with it.

    Raises:
      UserError: a number is out of range.
    """

    peak_value: float = 0.01
    decay_after: int = 10_000
    warmup_steps: int = 0
    cooldown_after: int = 0
    cooldown_steps: int = 0

    def __post_init__(self):
        steps = dict.fromkeys(("warmup_steps", "cooldown_after", "cooldown_steps"), COUNT_OR_0)
        allowed = {"peak_value": ABOVE_0, "decay_after": COUNT, **steps}
        ranges.check("optimizer.learning_rate.", self, allowed)

    def __call__(self, step: tf.Tensor) -> tf.Tensor:
        """Returns the learning rate of `step` (scalar int32, from 0), scalar float32."""
        count = tf.cast(step, tf.float32) + 1.0
        rate = self.peak_value * tf.math.rsqrt(tf.maximum(count / self.decay_after, 1.0))
        rate *= tf.minimum(1.0, count / max(self.warmup_steps, 1))
        if self.cooldown_steps:
            end = self.cooldown_after + self.cooldown_steps
            rate *= 0.1 + 0.9 * tf.clip_by_value((end - count) / self.cooldown_steps, 0.0, 1.0)
        return rate
