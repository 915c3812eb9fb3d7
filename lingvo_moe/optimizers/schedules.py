"""Learning rates by step."""

from __future__ import annotations

import dataclasses

from lingvo_moe.lazy import tf


@dataclasses.dataclass(frozen=True, kw_only=True)
class InverseSquareRoot:
    """`peak / sqrt(max(step, decay_after))`, with an optional linear warm-up and an optional linear cool-down.

    GShard appendix A.2, "1.0 learning rate with square root decay after 10k training steps", is
    `InverseSquareRoot(peak=1.0, decay_after=10_000)`: 0.01 for ten thousand steps, then falling.

    Attributes:
      peak: the numerator.
      decay_after: steps before the decay begins.
      warmup_steps: over which the rate grows linearly from near zero; 0 for none.
      cooldown_after, cooldown_steps: from that step on, over so many steps, the rate falls linearly to a tenth, and stays
        there; 0 steps for none. It is for short runs of a known length, which end the better for it.
    """

    peak: float = 1.0
    decay_after: int = 10_000
    warmup_steps: int = 0
    cooldown_after: int = 0
    cooldown_steps: int = 0

    def __call__(self, step: tf.Tensor) -> tf.Tensor:
        """The rate of `step` (scalar int32, from 0), scalar float32."""
        count = tf.cast(step, tf.float32) + 1.0
        rate = self.peak * tf.math.rsqrt(tf.maximum(count, float(self.decay_after)))
        rate *= tf.minimum(1.0, count / max(self.warmup_steps, 1))
        if self.cooldown_steps:
            rate *= tf.clip_by_value(1.0 - (count - self.cooldown_after) / self.cooldown_steps, 0.1, 1.0)
        return rate
