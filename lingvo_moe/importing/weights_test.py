"""Each tensor of the files is a part of one weight of ours, and a tensor that becomes ours comes back."""

from __future__ import annotations

import collections

import numpy as np
import pytest

from lingvo_moe.importing import hugging_face
from lingvo_moe.testing import hugging_face_models


@pytest.fixture(params=list(hugging_face_models.CONFIGS))
def case(request, tmp_path):
    hugging_face_models.write(tmp_path, request.param)
    return hugging_face.describe(tmp_path, "it").places, hugging_face_models.shapes(request.param)


def test_places_are_the_tensors_that_hugging_face_writes(case):
    """With their shapes, each once."""
    places, shapes = case
    found = [(place.tensor, place.shape) for path in places.specs for place in places.of(path)]
    assert collections.Counter(found) == collections.Counter(shapes.items())


def test_tensors_fill_each_weight_and_come_back(case):
    """Bit for bit, but for the outputs of experts: times and divided by 0.8, each rounded, differ in the last bit."""
    places, shapes = case
    draw = np.random.default_rng(0)
    tensors = {name: draw.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    for path, spec in places.specs.items():
        weight = np.full(spec.shape, np.nan, np.float32)
        for place in places.of(path):
            place.to_ours(tensors[place.tensor], weight)
        assert not np.isnan(weight).any(), path
        for place in places.of(path):
            found = place.from_ours(weight, np.float32)
            assert found.shape == place.shape and found.flags.c_contiguous and not np.shares_memory(found, weight)
            np.testing.assert_array_max_ulp(found, tensors[place.tensor], 0 if place.scale == 1 else 1)
