"""The largest element equals argmax, and the largest few equal a stable sort."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies
from hypothesis.extra import numpy as arrays

from lingvo_moe.lazy import tf
from lingvo_moe.ops.context import Context
from lingvo_moe.ops.top_k import VocabularyChunks, max_with_index, top_k
from lingvo_moe.testing import harness

# No subnormal numbers, which TensorFlow takes for zeros.
_VALUES = strategies.one_of(
    strategies.floats(width=32, allow_nan=False, allow_subnormal=False), strategies.sampled_from([0.0, -0.0, 1.0])
)
# Of which no two have a sum that is no number, or a zero of the other sign.
_SUMMED = strategies.one_of(
    strategies.floats(0, 2.0**99, width=32, allow_subnormal=False), strategies.sampled_from([-np.inf, 1.0, -1.0, 2.0])
)
PLATFORMS = ("", "cpu")


@given(arrays.arrays(np.float32, arrays.array_shapes(min_dims=1, max_dims=3, max_side=9), elements=_VALUES))
def test_it_is_argmax(values):
    """Ties and infinities among them."""
    best, index = max_with_index(tf.constant(values))
    np.testing.assert_array_equal(best, values.max(axis=-1))
    np.testing.assert_array_equal(index, values.argmax(axis=-1))
    assert index.dtype == tf.int32


def test_index_is_within_the_row_even_with_nan():
    assert int(max_with_index(tf.constant([1.0, np.nan, 2.0]))[1]) == 2


@pytest.mark.parametrize("platform", PLATFORMS)
@given(
    arrays.arrays(
        np.float32, strategies.tuples(strategies.integers(1, 3), strategies.integers(1, 48)), elements=_VALUES
    ),
    strategies.integers(1, 5),
)
def test_top_k_is_the_start_of_a_stable_sort(platform, values, count):
    """Ties and infinities among them."""
    count = min(count, values.shape[1])
    best, indices = top_k(tf.constant(values), count, Context(platform=platform))
    assert_first_of_a_stable_sort(best, indices, values)


@pytest.mark.parametrize("platform", PLATFORMS)
@given(strategies.data())
def test_top_k_sums_are_the_start_of_a_stable_sort(platform, data):
    """Of all rows of a batch together, of any length: a prime length has chunks of one element."""
    shape = data.draw(
        strategies.tuples(strategies.integers(1, 3), strategies.integers(1, 3), strategies.integers(1, 48))
    )
    values = data.draw(arrays.arrays(np.float32, shape, elements=_SUMMED))
    offsets = data.draw(arrays.arrays(np.float32, shape[:2], elements=_SUMMED))
    count = data.draw(strategies.integers(1, min(5, math.prod(shape[1:]))))
    chunks = VocabularyChunks.of(tf.constant(values), count)
    np.testing.assert_array_equal(chunks.largest(), values.max(axis=-1))
    best, indices = chunks.top_k_sums(tf.constant(offsets), count, Context(platform=platform))
    assert_first_of_a_stable_sort(best, indices, (values + offsets[..., None]).reshape(shape[0], -1))


@pytest.mark.parametrize("platform", PLATFORMS)
def test_xla_selects_alike(platform):
    """XLA's selection for a CPU is a library's, not the one that eager TensorFlow has."""
    values = np.random.default_rng(1).integers(0, 20, (3, 4, 60)).astype(np.float32)
    offsets = np.arange(12, dtype=np.float32).reshape(3, 4)

    def function(inputs: dict) -> dict:
        context = Context(platform=platform)
        best, indices = VocabularyChunks.of(inputs["values"], 5).top_k_sums(inputs["offsets"], 5, context)
        return {"best": best, "indices": indices}

    logical_axes = {"values": "btv", "offsets": "bt", "best": "bt", "indices": "bt"}
    found = harness.run(function, {"values": values, "offsets": offsets}, logical_axes=logical_axes)
    assert_first_of_a_stable_sort(found["best"], found["indices"], (values + offsets[..., None]).reshape(3, -1))


@pytest.mark.parametrize("platform", PLATFORMS)
def test_indices_of_a_row_with_a_nan_are_within_the_row(platform):
    indices = top_k(tf.constant([[1.0, np.nan, 2.0, 0.0]]), 2, Context(platform=platform))[1].numpy()
    assert (indices >= 0).all() and (indices < 4).all()


def assert_first_of_a_stable_sort(best: tf.Tensor, indices: tf.Tensor, values: np.ndarray):
    best, indices = np.asarray(best), np.asarray(indices)
    order = np.argsort(-values, axis=-1, kind="stable")[:, : best.shape[1]]
    np.testing.assert_array_equal(best, np.take_along_axis(values, order, axis=-1))
    np.testing.assert_array_equal(indices, order)
    assert indices.dtype == np.int32
