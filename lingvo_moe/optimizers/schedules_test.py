"""The learning rates are the papers'."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lingvo_moe.errors import UserError
from lingvo_moe.lazy import tf
from lingvo_moe.optimizers.schedules import InverseSquareRoot
from lingvo_moe.testing import harness

# A reciprocal square root and two products.
TOLERANCE = 4 * harness.FLOAT32_ROUNDING


@pytest.mark.parametrize("step, rate", [(0, 0.01), (5_000, 0.01), (9_999, 0.01), (39_999, 0.005), (999_999, 0.001)])
def test_gshard_1_over_root_after_10k_steps(step, rate):
    """GShard appendix A.2: "1.0 learning rate with square root decay after 10k training steps"."""
    np.testing.assert_allclose(InverseSquareRoot()(tf.constant(step)), rate, rtol=TOLERANCE)


@pytest.mark.parametrize("step", [0, 1, 9, 10, 99, 400])
def test_warmup_increases_linearly_to_the_schedule(step):
    """The warm-up multiplies the schedule."""
    schedule = InverseSquareRoot(peak_value=0.2, decay_after=100, warmup_steps=10)
    expected = 2.0 / math.sqrt(max(step + 1, 100)) * min(1.0, (step + 1) / 10)
    np.testing.assert_allclose(schedule(tf.constant(step)), expected, rtol=TOLERANCE)


@pytest.mark.parametrize("step, share", [(0, 1.0), (199, 1.0), (249, 0.55), (289, 0.19), (299, 0.1), (10_000, 0.1)])
def test_cooldown_decreases_linearly_to_a_tenth_of_the_schedule(step, share):
    """It reaches the tenth at its last step, not before; a run that continues beyond its planned end still learns."""
    curve, cooled = (
        InverseSquareRoot(decay_after=50, cooldown_after=after, cooldown_steps=steps)(tf.constant(step))
        for after, steps in ((0, 0), (200, 100))
    )
    np.testing.assert_allclose(cooled, share * curve, rtol=TOLERANCE)


@pytest.mark.parametrize(
    "field, value", [("peak_value", -1.0), ("peak_value", math.nan), ("decay_after", 0), ("cooldown_steps", -1)]
)
def test_numbers_out_of_range(field, value):
    """A rate of zero or less would train nothing, or away from the minimum, and no loss would say why."""
    with pytest.raises(UserError, match=rf"optimizer\.learning_rate\.{field} is {value}; "):
        InverseSquareRoot(**{field: value})
