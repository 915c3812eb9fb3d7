"""Values that a schedule cannot have are errors."""

from __future__ import annotations

import threading

import pytest

from lingvo_moe.errors import UserError
from lingvo_moe.training_schedule import TrainingSchedule


@pytest.mark.parametrize(
    "field", ["steps", "log_every", "evaluate_every", "evaluation_batches", "checkpoint_every", "keep"]
)
def test_schedule_fields_have_lower_bounds(field):
    """Zero is valid for `evaluate_every` alone."""
    least = 0 if field == "evaluate_every" else 1
    TrainingSchedule(**{field: least})
    with pytest.raises(UserError, match=f"training.{field} is {least - 1}; expected at least {least}"):
        TrainingSchedule(**{field: least - 1})


def test_the_grace_period_is_one_that_a_timer_has():
    """With a longer one the timer's thread would end, and the limit would not exist."""
    threading.Lock().acquire(timeout=TrainingSchedule(grace_seconds=threading.TIMEOUT_MAX).grace_seconds)
    with pytest.raises(UserError, match="training.grace_seconds is 10000000000.0; expected at least 0 and at most 9.2"):
        TrainingSchedule(grace_seconds=1e10)
