"""Dice coefficients are those of sets of voxels."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lingvo_moe.inference.dice import Overlap


@given(seed=st.integers(0, 99), volumes=st.integers(1, 3))
def test_equals_sets_of_voxels(seed, volumes):
    """Over several volumes together; class 3 is in none of them."""
    random, overlap = np.random.default_rng(seed), Overlap(4)
    predicted, labels = random.integers(0, 3, (2, volumes, 3, 2, 2))
    for pair in zip(predicted, labels):
        overlap.add(*pair)
    for label, found in enumerate(overlap.coefficients()):
        one, other = ({*zip(*np.nonzero(region == label))} for region in (predicted, labels))
        expected = 2 * len(one & other) / (len(one) + len(other)) if one or other else 1.0
        assert found == pytest.approx(expected, rel=1e-12)


def test_other_shapes_are_an_error():
    with pytest.raises(ValueError, match=r"predictions have shape \(2,\), labels \(3,\)"):
        Overlap(2).add(np.zeros(2, int), np.zeros(3, int))
