"""Protects the text of a plan: what its numbers are of, and that they can be compared."""

from __future__ import annotations

import pytest

from lingvo_moe.analysis import plan_text
from lingvo_moe.testing.plans import training_plan

_HOURS_PER_YEAR = 365.25 * 24


@pytest.mark.parametrize(
    ("topology", "devices_per_unit", "unit"),
    [
        ("v3:2x2x1", 2, "chip-hour (a chip has 2 cores)"),
        ("v5e:2x4", 1, "chip-hour"),
        ("h100:1x8", 1, "GPU-hour"),
    ],
)
def test_a_price_is_of_a_chip_or_a_gpu(topology, devices_per_unit, unit):
    """As cloud providers state it; the devices of a plan for TPU v3 are cores."""
    plan = training_plan("sparse_lm.Small", 8, topology=topology)
    hours = (plan.core_years(1e12) or 0) * _HOURS_PER_YEAR / devices_per_unit
    assert f" days, cost {2.5 * hours:,.0f} at 2.5 per {unit}\n" in plan_text.text(plan, 1e12, price=2.5)
