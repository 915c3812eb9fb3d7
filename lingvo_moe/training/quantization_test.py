"""int8 weights: small errors, exact zeros and largest values; what cannot be written is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from lingvo_moe.errors import UserError
from lingvo_moe.training import quantization

MATRICES = arrays.arrays(
    np.float32, arrays.array_shapes(min_dims=2, max_dims=4), elements=st.floats(-(2.0**99), 2.0**99, width=32)
)


@given(MATRICES)
def test_values_are_within_half_a_step(matrix):
    """The largest of each vector is exact up to float32, and a vector of zeros stays zero."""
    tensors = quantization.quantize({"w": matrix})
    found = quantization.dequantize(tensors["w"], tensors["w.scale"])
    largest = np.abs(matrix).max(axis=-1, keepdims=True).astype(np.float64)
    tiny = np.finfo(np.float32).tiny  # scales below it have fewer digits
    assert np.all(np.abs(found.astype(np.float64) - matrix) <= largest / 254 * (1 + 1e-5) + 127 * tiny)
    assert not found[np.broadcast_to(largest == 0, found.shape)].any()


def test_vectors_and_scalars_stay():
    """They are few, and normalisation depends on them."""
    vector, scalar = np.array([1.5, -2.25], np.float32), np.float32(3.0)
    tensors = quantization.quantize({"bias": vector, "temperature": np.asarray(scalar)})
    assert sorted(tensors) == ["bias", "temperature"]
    np.testing.assert_array_equal(tensors["bias"], vector)


def test_scales_of_a_damaged_file_are_no_error_here():
    """What uses the weights refuses values that are not finite; a warning of NumPy would say less."""
    found = quantization.dequantize(np.array([[127, 1], [0, 1]], np.int8), np.array([3e38, np.inf], np.float32))
    np.testing.assert_array_equal(found, np.array([[np.inf, 3e38], [np.nan, np.inf]], np.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused(bad):
    """The error names the tensor."""
    with pytest.raises(UserError, match="layer/w has values that are not finite"):
        quantization.quantize({"layer/w": np.array([[1.0, bad]], np.float32)})
