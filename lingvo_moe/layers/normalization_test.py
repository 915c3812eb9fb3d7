"""Layer normalisation and RMSNorm are their formulas, in float32 whatever the activations are."""

from __future__ import annotations

import numpy as np
import pytest

from lingvo_moe.layers.base import Context
from lingvo_moe.layers.normalization import LayerNorm, RMSNorm
from lingvo_moe.lazy import tf
from lingvo_moe.testing import harness

MODEL = 32
# Means over 32 elements, a root and two products; inputs are a few units large.
TOLERANCE = 32 * harness.FLOAT32_ROUNDING


def expected(inputs: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> np.ndarray:
    wide = inputs.astype(np.float64)
    return (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-6) * scale + bias


@pytest.fixture
def theta() -> dict:
    random = np.random.default_rng(0)
    return {name: tf.constant(random.normal(size=MODEL), tf.float32) for name in ("scale", "bias")}


@pytest.mark.parametrize("shape", [(4, MODEL), (2, 3, MODEL)])
def test_equals_numpy(shape, theta):
    inputs = np.random.default_rng(1).normal(2.0, 3.0, shape).astype(np.float32)
    found = LayerNorm(model_dim=MODEL)(theta, tf.constant(inputs), Context())
    np.testing.assert_allclose(
        found, expected(inputs, theta["scale"].numpy(), theta["bias"].numpy()), rtol=0, atol=TOLERANCE * 4
    )


def test_starts_as_zero_mean_and_unit_variance():
    weights = LayerNorm(model_dim=MODEL).weights()
    assert (weights["scale"].mean, weights["bias"].mean) == (1.0, 0.0)
    assert weights["scale"].stddev == weights["bias"].stddev == 0.0


def test_a_constant_row_is_not_divided_by_zero(theta):
    found = LayerNorm(model_dim=MODEL)(theta, tf.fill((1, MODEL), 7.0), Context())
    np.testing.assert_allclose(found[0], theta["bias"], rtol=0, atol=TOLERANCE)


def test_bfloat16_inputs_are_normalised_in_float32(theta):
    """Around a mean of 100 a bfloat16 variance would be noise; the only rounding is that of the result."""
    inputs = tf.cast(np.random.default_rng(2).normal(100.0, 2.0, (8, MODEL)), tf.bfloat16)
    found = LayerNorm(model_dim=MODEL)(theta, inputs, Context(dtype="bfloat16"))
    assert found.dtype == tf.bfloat16
    wide = expected(tf.cast(inputs, tf.float32).numpy(), theta["scale"].numpy(), theta["bias"].numpy())
    np.testing.assert_allclose(tf.cast(found, tf.float32), wide, rtol=harness.BFLOAT16_ROUNDING, atol=1e-4)


def root_mean_square_norm(inputs: np.ndarray, scale: np.ndarray, epsilon: float) -> np.ndarray:
    """Row by row, as Zhang and Sennrich (2019) define it, with an epsilon."""
    rows = inputs.astype(np.float64).reshape(-1, MODEL)
    normed = [row / np.sqrt(sum(x * x for x in row) / MODEL + epsilon) * scale for row in rows]
    return np.reshape(normed, inputs.shape)


def test_rms_norm_has_neither_mean_nor_bias(theta):
    """And an epsilon of its own, which is large here."""
    inputs = np.random.default_rng(1).normal(2.0, 3.0, (2, 3, MODEL)).astype(np.float32)
    layer, given = RMSNorm(model_dim=MODEL, epsilon=0.5), {"scale": theta["scale"]}
    assert layer.weights() == {"scale": LayerNorm(model_dim=MODEL).weights()["scale"]}
    found = layer(given, tf.constant(inputs), Context())
    wide = root_mean_square_norm(inputs, theta["scale"].numpy(), 0.5)
    np.testing.assert_allclose(found, wide, rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(layer(given, tf.zeros((1, MODEL)), Context()), np.zeros((1, MODEL)))


def test_rms_norm_of_bfloat16_inputs_is_computed_in_float32(theta):
    """Squares in bfloat16 would be rounded; the only rounding is that of the result."""
    inputs = tf.cast(np.random.default_rng(2).normal(0.0, 2.0, (8, MODEL)), tf.bfloat16)
    found = RMSNorm(model_dim=MODEL)({"scale": theta["scale"]}, inputs, Context(dtype="bfloat16"))
    assert found.dtype == tf.bfloat16
    wide = root_mean_square_norm(tf.cast(inputs, tf.float32).numpy(), theta["scale"].numpy(), 1e-6)
    np.testing.assert_allclose(tf.cast(found, tf.float32), wide, rtol=harness.BFLOAT16_ROUNDING, atol=1e-4)
