"""Convolutions equal loops over positions, and neither padding nor its amount changes an output."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lingvo_moe import tree
from lingvo_moe.errors import UserError
from lingvo_moe.layers.base import Context
from lingvo_moe.layers.convolution import ConvolutionModule, Subsampling
from lingvo_moe.lazy import tf
from lingvo_moe.testing import harness

MODEL = 4
BINS, CHANNELS = 8, 3
# Relative to the largest element: products over a few dozen elements, and normalisation.
TOLERANCE = 256 * harness.FLOAT32_ROUNDING


def theta_of(layer: ConvolutionModule | Subsampling) -> dict:
    random = np.random.default_rng(0)
    return tree.map_leaves(lambda weight: random.normal(size=weight.shape).astype(np.float32), layer.weights())


def convolve(layer: ConvolutionModule, theta: dict, inputs: np.ndarray, paddings: np.ndarray) -> np.ndarray:
    return layer(tree.map_leaves(tf.constant, theta), tf.constant(inputs), tf.constant(paddings), Context()).numpy()


def by_positions(layer: ConvolutionModule, theta: dict, inputs: np.ndarray, paddings: np.ndarray) -> np.ndarray:
    """The module in float64, one output position after another."""
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    theta = tree.map_leaves(lambda weight: weight.astype(np.float64), theta)
    outputs = np.zeros(inputs.shape)
    for b, t in np.ndindex(inputs.shape[:2]):
        mixed = np.zeros(MODEL)
        for tap in range(layer.kernel_size):
            source = t + tap - (layer.kernel_size - 1) // 2
            if 0 <= source < inputs.shape[1] and not paddings[b, source]:
                row = inputs[b, source]
                mixed += theta["depthwise"][tap] * (row @ theta["value"]) * sigmoid(row @ theta["gate"])
        normed = (mixed - mixed.mean()) / np.sqrt(mixed.var() + 1e-6)
        normed = normed * theta["depthwise_norm"]["scale"] + theta["depthwise_norm"]["bias"]
        outputs[b, t] = (normed * sigmoid(normed)) @ theta["wo"]
    return outputs


@settings(max_examples=10)
@given(kernel_size=st.integers(1, 7), length=st.integers(1, 6), seed=st.integers(0, 9))
def test_module_equals_a_loop_over_positions(kernel_size, length, seed):
    """Kernels of odd and even size, also longer than the sequence, over paddings anywhere."""
    layer, random = ConvolutionModule(model_dim=MODEL, kernel_size=kernel_size), np.random.default_rng(seed)
    inputs = random.normal(size=(2, length, MODEL)).astype(np.float32)
    paddings = random.random((2, length)) < 0.3
    expected = by_positions(layer, theta_of(layer), inputs, paddings)
    found = convolve(layer, theta_of(layer), inputs, paddings)
    # Where all frames are padding, the variance is 0 and epsilon alone keeps the quotient finite.
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * max(np.abs(expected).max(), 1.0))


@pytest.mark.slow
def test_sums_over_a_kernel_are_float32():
    """Of activations in bfloat16, too, in which 256 + 1 is 256: one channel sums 320 ones, another is 288 at once."""
    size, middle = 320, 159
    layer = ConvolutionModule(model_dim=MODEL, kernel_size=size)
    identity, norm = np.eye(MODEL, dtype=np.float32), theta_of(layer)["depthwise_norm"]
    norm = {"scale": np.ones_like(norm["scale"]), "bias": np.zeros_like(norm["bias"])}
    # The sigmoid of a gate of 0 is a half.
    theta = {"value": 2 * identity, "gate": 0 * identity, "wo": identity, "depthwise_norm": norm}
    theta["depthwise"] = np.zeros((size, MODEL), np.float32)
    theta["depthwise"][:, 0], theta["depthwise"][middle, 1] = 1, 288
    inputs, paddings = np.zeros((1, size, MODEL), np.float32), np.zeros((1, size), bool)
    inputs[0, :, 0], inputs[0, middle, 1] = 1, 1
    compiled = tf.function(layer, autograph=False, jit_compile=True)  # TensorFlow's own sums are float32
    tensors = tree.map_leaves(tf.constant, theta)
    found = compiled(tensors, tf.cast(inputs, tf.bfloat16), tf.constant(paddings), Context(dtype="bfloat16"))
    mixed = np.array([320.0, 288.0, 0.0, 0.0])
    normed = (mixed - mixed.mean()) / mixed.std()
    # Three roundings to eight bits: of the norm, of its sigmoid and of their product.
    np.testing.assert_allclose(
        tf.cast(found, tf.float32)[0, middle], normed / (1 + np.exp(-normed)), rtol=0, atol=3 * 2.0**-8
    )


SUBSAMPLING = Subsampling(num_bins=BINS, channels=CHANNELS, model_dim=MODEL)


def subsample(features: np.ndarray, paddings: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    outputs, left = SUBSAMPLING(
        tree.map_leaves(tf.constant, theta_of(SUBSAMPLING)), tf.constant(features), tf.constant(paddings), Context()
    )
    return outputs.numpy(), left.numpy()


def halved(inputs: np.ndarray, kernel: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """A 3 x 3 convolution of stride 2 and ReLU of one recording `[S, F, C]`; zeros after the last frame and bin."""
    padded = np.pad(inputs.astype(np.float64), [(0, 1), (0, 1), (0, 0)])
    outputs = np.zeros((len(inputs) // 2, inputs.shape[1] // 2, len(bias)))
    for t, f in np.ndindex(outputs.shape[:2]):
        outputs[t, f] = np.tensordot(padded[2 * t : 2 * t + 3, 2 * f : 2 * f + 3], kernel, 3) + bias
    return np.maximum(outputs, 0)


def test_subsampling_equals_a_loop_over_pixels():
    theta, features = theta_of(SUBSAMPLING), np.random.default_rng(1).normal(size=(2, 12, BINS)).astype(np.float32)
    found, _ = subsample(features, np.zeros((2, 12), bool))
    for recording, outputs in zip(features, found):
        hidden = halved(recording[..., None], theta["first"], theta["first_bias"])
        hidden = halved(hidden, theta["second"], theta["second_bias"])
        expected = np.tensordot(hidden, theta["projection"], 2)
        np.testing.assert_allclose(outputs, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


@pytest.mark.parametrize("frames", [4, 5, 7, 8])
def test_amount_and_content_of_padding_change_nothing(frames):
    """A recording of any number of frames, with 0 to 8 frames of anything after it."""
    features = np.random.default_rng(2).normal(size=(1, 16, BINS)).astype(np.float32)
    paddings = np.arange(16)[None] >= frames
    outputs, left = subsample(features, paddings)
    changed = np.where(paddings[..., None], np.float32(7.0), features)
    short, short_left = subsample(changed[:, :8], paddings[:, :8])
    count = -(-frames // 4)
    assert (~left).sum() == (~short_left).sum() == count
    np.testing.assert_allclose(outputs[:, :count], short[:, :count], rtol=0, atol=TOLERANCE * np.abs(short).max())


def test_bins_that_do_not_divide_are_an_error():
    with pytest.raises(UserError, match="num_bins is 6; subsampling needs a multiple of 4"):
        Subsampling(num_bins=6, channels=CHANNELS, model_dim=MODEL)


def test_an_empty_kernel_is_an_error():
    with pytest.raises(UserError, match="kernel_size is 0"):
        ConvolutionModule(model_dim=MODEL, kernel_size=0)
