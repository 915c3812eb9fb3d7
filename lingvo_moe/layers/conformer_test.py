"""A Conformer layer is its sublayers in the order of Gulati et al. 2020, figure 1, with two half steps."""

from __future__ import annotations

import numpy as np

from lingvo_moe import tree
from lingvo_moe.layers.attention import segment_mask
from lingvo_moe.layers.base import Context
from lingvo_moe.layers.conformer import ConformerLayer
from lingvo_moe.layers.convolution import ConvolutionModule
from lingvo_moe.layers.feed_forward import DenseFeedForward
from lingvo_moe.layers.mixture_of_experts import MixtureOfExperts
from lingvo_moe.layers.relative_attention import RelativeAttention
from lingvo_moe.layers.transformer import Masks
from lingvo_moe.lazy import tf
from lingvo_moe.testing import harness

BATCH, LENGTH, MODEL, HIDDEN = 2, 5, 8, 16
# Elements are about 1; some ten products over 8 and 16 in a row, summed in another order.
TOLERANCE = 64 * harness.FLOAT32_ROUNDING

EPSILON = 0.1  # large enough to be missed
LAYER = ConformerLayer(
    attention=RelativeAttention(model_dim=MODEL, num_heads=2, head_dim=4),
    feed_forward=DenseFeedForward(model_dim=MODEL, hidden_dim=HIDDEN, activation="swish"),
    convolution=ConvolutionModule(model_dim=MODEL, kernel_size=3, norm_epsilon=EPSILON),
    norm_epsilon=EPSILON,
)
RANDOM = np.random.default_rng(0)
INPUTS = RANDOM.normal(size=(BATCH, LENGTH, MODEL)).astype(np.float32)
SEGMENTS = tf.constant([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
MASKS = Masks(segment_mask(SEGMENTS, SEGMENTS), tf.equal(SEGMENTS, 0))


def theta_of(layer: ConformerLayer) -> dict:
    """Random weights, all of them unlike their initial values."""
    return tree.map_leaves(
        lambda weight: tf.constant(weight.mean + (weight.stddev or 0.3) * RANDOM.normal(size=weight.shape), tf.float32),
        layer.weights(),
    )


def normalised(theta: dict, inputs: np.ndarray) -> np.ndarray:
    centred = inputs - inputs.mean(-1, keepdims=True)
    return centred / np.sqrt(inputs.var(-1, keepdims=True) + EPSILON) * theta["scale"].numpy() + theta["bias"].numpy()


def fed(theta: dict, inputs: np.ndarray) -> np.ndarray:
    """The dense feed-forward layer with swish, of normalised inputs."""
    hidden = normalised(theta["norm"], inputs) @ theta["wi"].numpy()
    return hidden / (1.0 + np.exp(-hidden)) @ theta["wo"].numpy()


def test_a_layer_is_its_sublayers_with_half_steps_before_and_after():
    """x + FFN / 2, + attention, + convolution, + FFN / 2, normalisation; each reads its own normalised inputs."""
    theta = theta_of(LAYER)
    outputs = INPUTS + fed(theta["feed_forward_before"], INPUTS) / 2
    normed = tf.constant(normalised(theta["self_attention"]["norm"], outputs))
    attended = LAYER.attention(theta["self_attention"], normed, normed, MASKS.self_attention, Context())
    outputs = outputs + attended.numpy()
    normed = tf.constant(normalised(theta["convolution"]["norm"], outputs))
    outputs = outputs + LAYER.convolution(theta["convolution"], normed, MASKS.paddings, Context()).numpy()
    outputs = outputs + fed(theta["feed_forward_after"], outputs) / 2
    found, metrics = LAYER(theta, tf.constant(INPUTS), None, MASKS, Context())
    np.testing.assert_allclose(found, normalised(theta["norm"], outputs), rtol=0, atol=TOLERANCE)
    assert metrics == {}


def test_metrics_are_means_of_both_half_steps():
    """Each has experts and a router of its own; here those of the first half step all get the same gate."""
    experts = MixtureOfExperts(model_dim=MODEL, hidden_dim=HIDDEN, num_experts=4, num_groups=1)
    layer = ConformerLayer(attention=LAYER.attention, feed_forward=experts, convolution=LAYER.convolution)
    theta, losses = theta_of(layer), []
    for balanced in ("", "feed_forward_before", "feed_forward_after"):
        given = dict(theta)
        if balanced:
            given[balanced] = {**theta[balanced], "gate": tf.zeros_like(theta[balanced]["gate"])}
        losses.append(float(layer(given, tf.constant(INPUTS), None, MASKS, Context())[1]["aux_loss"]))
    assert len(set(losses)) == 3, losses
