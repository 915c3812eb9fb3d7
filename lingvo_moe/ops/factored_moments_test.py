"""The mean square of an update with factored second moments is the same from the update and from its factors."""

from __future__ import annotations

import numpy as np
import pytest

from lingvo_moe.lazy import tf
from lingvo_moe.ops.context import Context
from lingvo_moe.ops.factored_moments import mean_by_rows, prefers_mean_by_rows
from lingvo_moe.sharding.layout import DeviceMesh, Layout
from lingvo_moe.testing import harness

# Sums over up to 30 elements in another order.
TOLERANCE = 32 * harness.FLOAT32_ROUNDING


@pytest.mark.parametrize(
    ("shape", "rows", "columns"),
    [
        ((5, 6), (0,), (1,)),
        ((5, 2, 3), (0,), (1, 2)),
        ((2, 3, 5), (0, 1), (2,)),
        ((2, 3, 4, 5), (2,), (3,)),
    ],
)
def test_equals_the_mean_of_the_update(shape, rows, columns):
    """One mean for each matrix, with the dimensions of rows and columns kept."""
    random = np.random.default_rng(0)
    gradient = random.normal(size=shape)
    row = np.square(gradient).mean(axis=columns, keepdims=True)
    by_column = np.abs(gradient.mean(axis=rows, keepdims=True))
    expected = (np.square(gradient * by_column) / row).mean(axis=rows + columns, keepdims=True)
    found = mean_by_rows(*(tf.constant(array, tf.float32) for array in (gradient, row, by_column)), rows, columns)
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE)


@pytest.mark.parametrize(
    ("logical_axes", "mesh", "platform", "expected"),
    [
        ("MH", "1", "cpu", True),
        ("EMH", "8", "cpu", True),
        ("MH", "4x2", "cpu", False),
        ("MH", "1", "tpu", False),
        ("MH", "1", "", False),
    ],
)
def test_it_is_for_whole_matrices_on_a_cpu(logical_axes, mesh, platform, expected):
    """Where a matrix is sharded, its sums would cross devices once more."""
    context = Context(Layout.of(DeviceMesh.parse(mesh)), platform=platform)
    dimensions = (len(logical_axes) - 2,), (len(logical_axes) - 1,)
    assert prefers_mean_by_rows(logical_axes, *dimensions, context) == expected
