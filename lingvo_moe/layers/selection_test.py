"""The first of the largest, as argmax has it, whatever the rows hold."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies
from hypothesis.extra import numpy as arrays

from lingvo_moe.layers.selection import largest
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
