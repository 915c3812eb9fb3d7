"""Protects the text of a plan: what its numbers are of, and that they can be compared."""

from __future__ import annotations

import dataclasses

import pytest

from lingvo_moe.analysis import plan_text
from lingvo_moe.analysis.plan import Memory
from lingvo_moe.analysis.search import Trial
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
    hours = (plan.device_years(1e12) or 0) * _HOURS_PER_YEAR / devices_per_unit
    assert f" days, cost {2.5 * hours:,.0f} at 2.5 per {unit}\n" in plan_text.text(plan, 1e12, price=2.5)


def test_small_sizes_can_be_compared():
    """Below one GiB they are MiB, so that a small model's memory is not a column of zeros."""
    memory = Memory(2**30, 2**20 * 1023, 2**19, 2**17, 3 * 2**29)
    lines = (
        plan_text.text(training_plan("sparse_lm.Small", 8, memory=memory), 1e12)
        .split("memory per core\n")[1]
        .split("\n")[:6]
    )
    assert [" ".join(line.split()[-3:]) for line in lines] == [
        "1.00 GiB [p]",
        "1023.00 MiB [p]",
        "0.50 MiB [p]",
        "0.12 MiB [p]",
        "1.50 GiB [c]",
        "total 3.50 GiB",
    ]


@pytest.mark.parametrize(("topology", "device"), [("v3:2x2x1", "core"), ("h100:1x8", "GPU")])
def test_numbers_have_a_unit_and_marks_a_legend(topology, device):
    """The legend comes before the first mark; bytes of a collective are one device's, a group's size counts devices."""
    plan = training_plan("sparse_lm.Small", 8, topology=topology)
    text = plan_text.text(plan, 1e12)
    assert text.index("[") == text.index("[c] the compiler's number   [p] ")
    assert f"among     8 {device}s     24 x [c]      256.0 MiB per {device} [c]" in text
    volumes = dataclasses.replace(plan, unit="voxels")
    line = plan_text.trial(Trial((), volumes))
    assert f"8.02 GiB per {device} [c] " in line and " voxels/s [c, m]" in line and "tokens" not in line
