"""Tests that the collectives of M4 without experts are those of the golden texts; see `write_golden_test`."""

from __future__ import annotations

import pytest

from tools import plan_zoo, write_golden

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", [name for name in plan_zoo.large_models() if name.startswith("m4.Dense")])
def test_collectives_of_the_miniature(name):
    """Protects the annotations, as the test of the other models does."""
    assert write_golden.golden_collectives(name) == write_golden.collectives(name), "`make golden`, if this is intended"
