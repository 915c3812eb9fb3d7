"""Measures a training run: steps, tokens, losses and rates."""

from __future__ import annotations

import time

import jax
import numpy as np

_LOG_EVERY = 5  # seconds
_READ_LOSS_EVERY = 10  # steps


class Every:
    """A clock of periods."""

    def __init__(self, seconds: float):
        self._seconds, self._last = seconds, time.monotonic()

    def passed(self) -> bool:
        """Returns whether the period has passed; if so, the next one starts."""
        if time.monotonic() - self._last < self._seconds:
            return False
        self._last = time.monotonic()
        return True


class Meter:
    """Counts steps and tokens, and reads the metrics of some steps."""

    def __init__(self):
        self.steps = self.tokens = 0
        self._start, self._every = time.monotonic(), Every(_LOG_EVERY)
        self._then = (self._start, 0, 0)
        self._losses: list[jax.Array] = []
        self._metrics: dict = {}

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def is_due(self) -> bool:
        """Returns whether to log; true once in each period."""
        return bool(self._losses) and self._every.passed()

    def add(self, tokens: int, metrics: dict):
        """Adds a step; waits for an earlier one, so that few are dispatched ahead of the device."""
        self.steps, self.tokens, self._metrics = self.steps + 1, self.tokens + tokens, metrics
        if self.steps % _READ_LOSS_EVERY == 0:
            self._losses.append(metrics["cross_entropy"])
            jax.block_until_ready(self._losses[-2:][0])

    def read(self) -> dict:
        """Returns the values to log, of the steps since the last time."""
        values = {name: float(self._metrics[name]) for name in ("learning_rate", "skipped")}
        loss, self._losses = float(np.mean([float(loss) for loss in self._losses])), []
        (then, steps, tokens), self._then = self._then, (time.monotonic(), self.steps, self.tokens)
        seconds = self._then[0] - then
        rates = {"steps_a_second": (self.steps - steps) / seconds, "tokens_a_second": (self.tokens - tokens) / seconds}
        return {"steps": self.steps, "tokens": self.tokens, "loss": loss, **values, **rates}
