"""Protects the figures that a GPU run logs: rates and losses are of the steps since the last line."""

from __future__ import annotations

import types

import numpy as np
import pytest

from tools.gpu_training import meter
from tools.gpu_training.meter import Every, Meter


class Clock:
    """A clock that the test sets."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(meter, "time", types.SimpleNamespace(monotonic=clock.monotonic))
    return clock


def _add(metered: Meter, steps: int, loss: float):
    for _ in range(steps):
        metered.add(50, {"cross_entropy": np.float32(loss), "learning_rate": 0.5, "skipped": 1})


def test_rates_and_losses_are_of_the_steps_since_the_last_line(clock):
    """20 steps in 10 seconds, then 40 in 5; counts and the elapsed time go through."""
    metered = Meter()
    _add(metered, 20, loss=3.0)
    clock.now += 10
    first = metered.read()
    _add(metered, 40, loss=2.0)
    clock.now += 5
    second = metered.read()
    shared = {"learning_rate": 0.5, "skipped": 1.0}
    assert first == {"steps": 20, "tokens": 1000, "loss": 3.0, "steps_a_second": 2, "tokens_a_second": 100, **shared}
    assert second == {"steps": 60, "tokens": 3000, "loss": 2.0, "steps_a_second": 8, "tokens_a_second": 400, **shared}
    assert metered.elapsed == 15


def test_a_period_passes_once(clock):
    every = Every(5)
    passed = []
    for clock.now in (104, 105, 106, 109, 110):
        passed.append(every.passed())
    assert passed == [False, True, False, False, True]
