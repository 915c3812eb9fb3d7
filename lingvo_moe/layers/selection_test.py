"""The first of the largest, as argmax has it, and the largest few, as a stable sort has them, whatever the rows hold."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies
from hypothesis.extra import numpy as arrays

from lingvo_moe.layers.selection import largest, largest_few
from lingvo_moe.lazy import tf

_VALUES = strategies.one_of(strategies.floats(width=32, allow_nan=False), strategies.sampled_from([0.0, -0.0, 1.0]))


@given(arrays.arrays(np.float32, arrays.array_shapes(min_dims=1, max_dims=3, max_side=9), elements=_VALUES))
def test_it_is_argmax(values):
    """Ties and infinities among them."""
    best, place = largest(tf.constant(values))
    np.testing.assert_array_equal(best, values.max(axis=-1))
    np.testing.assert_array_equal(place, values.argmax(axis=-1))
    assert place.dtype == tf.int32


def test_a_place_is_a_place_even_among_numbers_that_are_none():
    assert int(largest(tf.constant([1.0, np.nan, 2.0]))[1]) == 2


@given(arrays.arrays(np.float32, strategies.tuples(strategies.integers(1, 3), strategies.integers(1, 48)), elements=_VALUES),
       strategies.integers(1, 5))
def test_the_largest_few_are_the_first_of_a_stable_sort(values, count):
    """Ties and infinities among them; below minus infinity there is no order to keep."""
    count = min(count, values.shape[1])
    best, indices = (part.numpy() for part in largest_few(tf.constant(values), count))
    order = np.argsort(-values, axis=-1, kind="stable")[:, :count]
    np.testing.assert_array_equal(best, np.take_along_axis(values, order, axis=-1))
    np.testing.assert_array_equal(np.where(best > -np.inf, indices, 0), np.where(best > -np.inf, order, 0))
    assert indices.dtype == np.int32 and (0 <= indices).all() and (indices < values.shape[1]).all()


def test_the_few_of_a_row_with_a_number_that_is_none_are_places_of_it():
    indices = largest_few(tf.constant([[1.0, np.nan, 2.0, 0.0]]), 2)[1].numpy()
    assert (0 <= indices).all() and (indices < 4).all()
