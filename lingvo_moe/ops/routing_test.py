"""A router's choices have one place each in the buffers of experts, or none."""

from __future__ import annotations

import numpy as np
import pytest

from lingvo_moe.lazy import tf
from lingvo_moe.ops.routing import NONE, Routing, sum_of_choices

CAPACITY = 2


def routing(experts: list | None, positions: list, weights: list) -> Routing:
    """A routing of one group."""
    chosen = None if experts is None else tf.constant([experts], tf.int32)
    return Routing(chosen, tf.constant([positions], tf.int32), tf.constant([weights], tf.float32), {})


def test_choices_have_the_positions_of_their_experts():
    """Those that overflow, or weigh nothing, have none: it would be the first position of the next expert."""
    found = routing([[0, 2], [1, 0], [1, 2]], [[0, 1], [1, 1], [2, 0]], [[0.5, 0.25], [1, 1], [1, 0]])
    assert found.shape == (1, 3, 2)
    expected = [[[0, 2 * CAPACITY + 1], [CAPACITY + 1, 1], [NONE, NONE]]]
    np.testing.assert_array_equal(found.buffer_positions(CAPACITY), expected)


def test_a_token_with_nan_takes_no_position_of_another():
    """Its weight is not 0, as that of others that overflow, and it must not spoil another expert's token."""
    found = routing([[0], [0]], [[1], [2]], [[np.nan], [np.nan]])
    np.testing.assert_array_equal(found.buffer_positions(CAPACITY), [[[1], [NONE]]])


@pytest.mark.parametrize("experts", [[[0, 1, 2], [0, 1, 2]], None])
def test_combine_weights_are_at_the_positions(experts):
    """Without `experts`, choice e is expert e."""
    found = routing(experts, [[0, 0, 2], [1, 5, 1]], [[0.5, 0.25, 1], [2, 3, 4]])
    expected = np.zeros((1, 2, 3, CAPACITY), np.float32)
    expected[0, 0, 0, 0], expected[0, 0, 1, 0], expected[0, 1, 0, 1], expected[0, 1, 2, 1] = 0.5, 0.25, 2, 4
    np.testing.assert_array_equal(found.combine_weights(3, CAPACITY), expected)
    np.testing.assert_array_equal(found.expert_indices(), [[[0, 1, 2], [0, 1, 2]]])


@pytest.mark.parametrize("count", [1, 2, 8, 9])
def test_choices_are_summed(count):
    """Few of them by a chain of sums, many by a reduction."""
    values = np.arange(2 * 3 * count * 4, dtype=np.float32).reshape(2, 3, count, 4)
    np.testing.assert_array_equal(sum_of_choices(tf.constant(values)), values.sum(axis=2))
