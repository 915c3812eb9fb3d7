"""Tests that the collectives of M4 with experts are those of the golden texts; see `write_golden_test`."""

from __future__ import annotations

import pytest

from lingvo_moe.analysis import plan
from tools import plan_zoo, write_golden

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", [name for name in plan_zoo.large_models() if name.startswith("m4.MoE")])
def test_collectives_of_the_miniature(name):
    """Protects the annotations, as the test of the other models does."""
    assert write_golden.golden_collectives(name) == write_golden.collectives(name), "`make golden`, if this is intended"


def test_every_part_of_a_step_has_its_scope():
    """The cycles of a part whose scope is renamed in the layers would be in `other`."""
    planned = write_golden.planned("m4.MoE128E12L")
    assert sum(planned.cycles_by_part.values()) == planned.cycles
    of_others = {"convolution", "subsampling", "ctc", "analysis", "upsampling", "synthesis"}  # speech and volumes
    assert all((planned.cycles_by_part[part] > 0) == (part not in of_others) for part in plan.PARTS)
    assert planned.cycles_by_part["other"] < planned.cycles / 4
