"""Draws cases with Hypothesis, reproducibly, and shrinks a failing one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import hypothesis
from hypothesis import HealthCheck, Phase, strategies
from hypothesis.errors import Flaky

from tools.fuzz import file_targets, flag_targets
from tools.fuzz.case import Case
from tools.fuzz.fixtures import Fixtures
from tools.fuzz.mutations import weighted

Value = TypeVar("Value")


class _FailedError(Exception):
    """Tells Hypothesis that a case failed."""


def strategy(fixtures: Fixtures) -> strategies.SearchStrategy[Case]:
    """Returns the strategy that draws from all targets by their weights."""
    of_flags = {target(): weight for target, weight in flag_targets.TARGETS.items()}
    of_files = {target(fixtures): weight for target, weight in file_targets.TARGETS.items()}
    return weighted(of_flags | of_files)


def draw(drawn: strategies.SearchStrategy[Value], seed: int, count: int) -> list[Value]:
    """Returns `count` values of a strategy, or all if there are fewer; the same seed and count give the same values.

    All are drawn before any is used, as Hypothesis also draws constants of the modules that are imported by then.
    """
    values: list[Value] = []

    @hypothesis.seed(seed)
    @_settings(count, Phase.generate)
    @hypothesis.given(drawn)
    def collect(value):
        values.append(value)

    collect()
    return values


def shrink(
    drawn: strategies.SearchStrategy[Value], seed: int, count: int, number: int, fails: Callable[[Value], bool]
) -> Value | None:
    """Returns the simplest failing value that Hypothesis finds from the value `number` of `draw`; None if that passes.

    Args:
      drawn: the strategy, as of `draw`.
      seed: as of `draw`.
      count: as of `draw`.
      number: the index of the value to start from.
      fails: whether a value fails.
    """
    values: list[Value] = []
    failed: list[Value] = []

    @hypothesis.seed(seed)
    @_settings(count, Phase.generate, Phase.shrink)
    @hypothesis.given(drawn)
    def attempt(value):
        values.append(value)
        if (len(values) == number + 1 or failed) and fails(value):
            failed.append(value)
            raise _FailedError

    try:
        attempt()
    except (_FailedError, Flaky):
        return failed[-1]  # Hypothesis ends with the simplest failing value
    return None


def _settings(count: int, *phases: Phase) -> hypothesis.settings:
    return hypothesis.settings(
        max_examples=count,
        phases=phases,
        database=None,
        deadline=None,
        derandomize=False,
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
        verbosity=hypothesis.Verbosity.quiet,
    )
