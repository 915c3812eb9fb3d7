"""The dense feed-forward layer is two matrix products and an activation, position by position."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from lingvo_moe.errors import UserError
from lingvo_moe.layers.base import Context, Layer
from lingvo_moe.layers.feed_forward import (
    FEED_FORWARDS,
    DenseFeedForward,
    call_feed_forward,
    make_feed_forward,
    register_feed_forward,
)
from lingvo_moe.lazy import tf
from lingvo_moe.sharding.layout import DeviceMesh, Layout
from lingvo_moe.testing import harness

# Relative to the largest element: products over M = 8 and H = 16, summed in another order.
TOLERANCE = 16 * harness.FLOAT32_ROUNDING
LAYER = DenseFeedForward(model_dim=8, hidden_dim=16)


def case() -> dict:
    random = np.random.default_rng(0)
    theta = {name: random.normal(size=weight.shape).astype(np.float32) for name, weight in LAYER.weights().items()}
    return {"theta": theta, "inputs": random.normal(size=(8, 4, 8)).astype(np.float32)}


def call(layout: Layout = Layout()):
    def function(inputs: dict) -> dict:
        paddings = tf.zeros(inputs["inputs"].shape[:2], tf.bool)
        outputs, metrics = LAYER(inputs["theta"], inputs["inputs"], paddings, Context(layout))
        assert metrics == {}
        return {"outputs": outputs}

    return function


def test_equals_numpy():
    inputs = case()
    expected = np.maximum(0, inputs["inputs"].astype(np.float64) @ inputs["theta"]["wi"]) @ inputs["theta"]["wo"]
    found = harness.run(call(), inputs)["outputs"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


@pytest.mark.parametrize("mesh", ["8", "4x2"])
def test_partitioned_equals_unpartitioned(mesh):
    layout = Layout.of(DeviceMesh.parse(mesh))
    logical_axes = {"theta/wi": "MH", "theta/wo": "HM", "inputs": "BTM"}
    logical_axes |= {f"gradients/{path}": name for path, name in logical_axes.items()} | {"values/outputs": "BTM"}
    one = harness.run(harness.with_gradients(call()), case())
    many = harness.run(harness.with_gradients(call(layout)), case(), layout, logical_axes)
    for path, expected in one.items():
        np.testing.assert_allclose(many[path], expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


def test_has_2mh_weights():
    assert LAYER.num_weights() == 2 * 8 * 16


def test_swish_is_x_times_its_sigmoid():
    """Chosen by name, and computed eagerly."""
    layer, given = make_feed_forward("dense:activation=swish", {"model_dim": 8, "hidden_dim": 16}), case()
    theta = {name: tf.constant(weight) for name, weight in given["theta"].items()}
    found, _ = layer(theta, tf.constant(given["inputs"]), tf.zeros((8, 4), tf.bool), Context())
    hidden = given["inputs"].astype(np.float64) @ given["theta"]["wi"]
    expected = hidden / (1 + np.exp(-hidden)) @ given["theta"]["wo"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


@pytest.mark.parametrize("size", [0, -4])
def test_a_size_out_of_range_is_an_error(size):
    """A layer pattern may set it: `dense:hidden_dim=0`."""
    with pytest.raises(UserError, match=f"layer dense: hidden_dim is {size}; expected at least 1"):
        DenseFeedForward(model_dim=8, hidden_dim=size)


def test_an_unknown_activation_is_an_error():
    with pytest.raises(UserError, match="activation is 'swich'; use relu or swish. Did you mean swish"):
        make_feed_forward("dense:activation=swich", {"model_dim": 8, "hidden_dim": 16})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Malformed(Layer):
    """A user's layer, with the metric `open` and outputs that lack one dimension's last element."""

    dimension: int = 0
    returned: str = "open"

    metric_names = ("open",)

    def __call__(self, theta, inputs, paddings, context):
        shape = [size - (d == self.dimension) for d, size in enumerate(inputs.shape)]
        return tf.ones(shape), {self.returned: tf.constant(0.5)}


@pytest.mark.parametrize("choice", ["malformed:dimension=1", "malformed:dimension=2"])
def test_outputs_of_another_shape_name_the_layer(choice):
    """TensorFlow would name two numbers and an addition, or broadcast."""
    with FEED_FORWARDS.isolated():
        register_feed_forward("malformed")(Malformed)
        layer = make_feed_forward(choice, {})
        shape = "(2, 2, 8)" if choice.endswith("1") else "(2, 3, 7)"
        message = (
            f"feed-forward layer 'malformed': a call returned outputs of shape {shape} for inputs of shape (2, 3, 8)."
        )
        with pytest.raises(UserError, match=re.escape(message)):
            call_feed_forward(layer, {}, tf.ones((2, 3, 8)), tf.zeros((2, 3), tf.bool), Context())


def test_other_metrics_than_the_declared_ones_name_the_layer():
    """Their curves would be zeros."""
    with FEED_FORWARDS.isolated():
        register_feed_forward("malformed")(Malformed)
        layer = make_feed_forward("malformed:dimension=3:returned=opened", {})
        with pytest.raises(UserError, match="^feed-forward layer 'malformed': metric_names declares open, .* opened"):
            call_feed_forward(layer, {}, tf.ones((2, 3, 8)), tf.zeros((2, 3), tf.bool), Context())
