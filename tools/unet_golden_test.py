"""Tests that the collectives of the U-Net are those of the golden texts; see `write_golden_test`."""

from __future__ import annotations

import pytest

from lingvo_moe.analysis import plan, plan_text
from tools import plan_zoo, write_golden

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", [name for name in plan_zoo.large_models() if name.startswith("unet.")])
def test_collectives_of_the_miniature(name):
    """Protects the annotations, as the test of the other models does."""
    assert write_golden.golden_collectives(name) == write_golden.collectives(name), "`make golden`, if this is intended"


def test_a_plan_of_volumes_counts_voxels():
    """Of a batch of the miniature, and says so where it says tokens of a text."""
    planned = write_golden.planned("unet.Volume256Mesh2x32")
    assert planned.tokens == 4 * 16**3
    text = plan_text.text(planned, 1e9)
    assert "voxels/s" in text and "1e+09 voxels" in text and "tokens" not in text


def test_sixteen_partitions_are_fourteen_times_as_fast():
    """GSPMD's table 8 has 15.7 times. By the plans, compute and collectives together."""
    one, sixteen = (
        plan.Plan.load(plan_zoo.DIRECTORY / f"unet.Volume128Mesh{mesh}.json").step_seconds for mesh in ("1x1", "1x16")
    )
    assert one is not None and sixteen is not None and 14 * sixteen <= one
