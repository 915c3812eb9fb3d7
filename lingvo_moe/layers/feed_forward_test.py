"""The dense feed-forward layer is its matrix products and an activation, position by position."""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np
import pytest

from lingvo_moe import tree
from lingvo_moe.errors import UserError
from lingvo_moe.layers.base import Context, Layer, Weight
from lingvo_moe.layers.feed_forward import (
    FEED_FORWARDS,
    DenseFeedForward,
    FeedForward,
    call_feed_forward,
    feed_forward_weights,
    make_feed_forward,
    register_feed_forward,
)
from lingvo_moe.lazy import tf
from lingvo_moe.sharding.layout import DeviceMesh, Layout
from lingvo_moe.testing import harness

# Relative to the largest element: products over M = 8 and H = 16, summed in another order.
TOLERANCE = 16 * harness.FLOAT32_ROUNDING
LAYER = DenseFeedForward(model_dim=8, hidden_dim=16, biases=True)
GATED = dataclasses.replace(LAYER, activation="gelu", gated=True)


def case(layer: DenseFeedForward = LAYER) -> dict:
    random = np.random.default_rng(0)
    theta = {name: random.normal(size=weight.shape).astype(np.float32) for name, weight in layer.weights().items()}
    return {"theta": theta, "inputs": random.normal(size=(8, 4, 8)).astype(np.float32)}


def call(layout: Layout = Layout(), layer: DenseFeedForward = LAYER):
    def function(inputs: dict) -> dict:
        paddings = tf.zeros(inputs["inputs"].shape[:2], tf.bool)
        outputs, metrics = layer(inputs["theta"], inputs["inputs"], paddings, Context(layout))
        assert metrics == {}
        return {"outputs": outputs}

    return function


@pytest.mark.parametrize("biases", [True, False])
def test_equals_numpy(biases):
    inputs, layer = case(), dataclasses.replace(LAYER, biases=biases)
    theta = inputs["theta"] = {name: inputs["theta"][name] for name in layer.weights()}
    hidden = np.maximum(0, inputs["inputs"].astype(np.float64) @ theta["wi"] + theta.get("wi_bias", 0.0))
    expected = hidden @ theta["wo"] + theta.get("wo_bias", 0.0)
    found = harness.run(call(layer=layer), inputs)["outputs"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


@pytest.mark.parametrize("mesh, layer", [("8", LAYER), ("4x2", LAYER), ("4x2", GATED)])
def test_partitioned_equals_unpartitioned(mesh, layer):
    layout = Layout.of(DeviceMesh.parse(mesh))
    logical_axes = {f"theta/{name}": weight.logical_axes for name, weight in layer.weights().items()}
    logical_axes["inputs"] = "BTM"
    logical_axes |= {f"gradients/{path}": name for path, name in logical_axes.items()} | {"values/outputs": "BTM"}
    one = harness.run(harness.with_gradients(call(layer=layer)), case(layer))
    many = harness.run(harness.with_gradients(call(layout, layer)), case(layer), layout, logical_axes)
    for path, expected in one.items():
        np.testing.assert_allclose(many[path], expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


def test_has_2mh_weights():
    """And biases only where they are asked for: the papers' layers have none. A gate has a third matrix."""
    assert dataclasses.replace(LAYER, biases=False).num_weights() == 2 * 8 * 16
    assert LAYER.num_weights() == 2 * 8 * 16 + 8 + 16
    assert GATED.num_weights() == 3 * 8 * 16 + 8 + 2 * 16
    assert GATED.weights()["wi_linear"] == GATED.weights()["wi"]


def test_swish_is_x_times_its_sigmoid():
    """Chosen by name, and computed eagerly."""
    given = case()
    layer = make_feed_forward("dense:activation=swish", {"model_dim": 8, "hidden_dim": 16, "biases": True})
    theta = {name: tf.constant(weight) for name, weight in given["theta"].items()}
    found, _ = layer(theta, tf.constant(given["inputs"]), tf.zeros((8, 4), tf.bool), Context())
    hidden = given["inputs"].astype(np.float64) @ given["theta"]["wi"] + given["theta"]["wi_bias"]
    expected = hidden / (1 + np.exp(-hidden)) @ given["theta"]["wo"] + given["theta"]["wo_bias"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


GATES = {
    "relu": lambda x: float(x > 0),
    "swish": lambda x: 1 / (1 + math.exp(-x)),
    "gelu": lambda x: (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
}


@pytest.mark.parametrize("activation, biases", [("gelu", False), ("swish", True), ("relu", True)])
def test_gated_layers_multiply_activations_by_a_linear_projection(activation, biases):
    """Shazeer 2020, equation 6, element by element; chosen as in a layer pattern."""
    choice = f"dense:activation={activation}:gated=true"
    layer = make_feed_forward(choice, {"model_dim": 8, "hidden_dim": 16, "biases": biases})
    assert isinstance(layer, DenseFeedForward)
    given = case(layer)
    theta = {name: weight.astype(np.float64) for name, weight in given["theta"].items()}
    expected = np.zeros(given["inputs"].shape) + theta.get("wo_bias", 0.0)
    for index in np.ndindex(given["inputs"].shape[:2]):
        vector = given["inputs"][index].astype(np.float64)
        for h in range(16):
            hidden = vector @ theta["wi"][:, h] + (theta["wi_bias"][h] if biases else 0.0)
            linear = vector @ theta["wi_linear"][:, h] + (theta["wi_linear_bias"][h] if biases else 0.0)
            expected[index] += hidden * GATES[activation](hidden) * linear * theta["wo"][h]
    found = call(layer=layer)(tree.map_leaves(tf.constant, given))["outputs"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


def test_every_matrix_of_a_gated_layer_is_prepared_for_decoding(monkeypatch):
    """Of stacked layers, as for a CPU, which multiplies by transposed ones."""
    monkeypatch.setattr("lingvo_moe.ops.projection.LARGE", 1)
    stacked = {name: tf.ones((1, *weight.shape)) for name, weight in GATED.weights().items()}
    prepared = GATED.prepare_decoding(stacked, Context(platform="cpu"))
    changed = {name for name in stacked if prepared[name] is not stacked[name]}
    assert changed == {"wi", "wi_linear", "wo"} and prepared.keys() == stacked.keys()


@pytest.mark.parametrize("size", [0, -4])
def test_a_size_out_of_range_is_an_error(size):
    """A layer pattern may set it: `dense:hidden_dim=0`."""
    with pytest.raises(UserError, match=f"layer dense: hidden_dim is {size}; expected at least 1"):
        DenseFeedForward(model_dim=8, hidden_dim=size)


def test_an_unknown_activation_is_an_error():
    with pytest.raises(UserError, match="activation is 'swich'; use one of relu, swish, gelu. Did you mean swish"):
        make_feed_forward("dense:activation=swich", {"model_dim": 8, "hidden_dim": 16})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Malformed(Layer):
    """A user's layer with one of several mistakes; no two of its results are right."""

    mistake: str = "boom"

    metric_names = ("open",)

    def weights(self) -> dict:
        return {
            "list": [Weight((8,), "M")],
            "norm": {"norm": Weight((8,), "M")},
            "axis": {"w": Weight((8,), "Q")},
            "array": {"w": {"v": np.ones(8)}},
        }[self.mistake]

    def __call__(self, theta, inputs, paddings, context):
        metrics = {"open": tf.constant(0.5)}
        return {
            "right": (inputs, metrics),
            "length": (inputs[:, 1:], metrics),
            "size": (inputs[..., 1:], metrics),
            "dtype": (tf.cast(inputs, tf.float64), metrics),
            "alone": inputs,
            "none": (None, metrics),
            "name": (inputs, {"opened": tf.constant(0.5)}),
            "vector": (inputs, {"open": inputs}),
            "count": (inputs, {"open": tf.constant(1)}),
        }[self.mistake]


def malformed(mistake: str) -> FeedForward:
    register_feed_forward("malformed")(Malformed)
    return make_feed_forward(f"malformed:mistake={mistake}", {})


OUTPUTS = "the output of a call, [B, T, M] as its input, is"


@pytest.mark.parametrize(
    "mistake, message",
    [
        ("length", f": {OUTPUTS} a float32 [2, 2, 8]; expected a float32 [2, 3, 8]."),
        ("size", f": {OUTPUTS} a float32 [2, 3, 7]; expected a float32 [2, 3, 8]."),
        ("dtype", f": {OUTPUTS} a float64 [2, 3, 8]; expected a float32 [2, 3, 8]."),
        ("none", f": {OUTPUTS} None; expected a float32 [2, 3, 8]."),
        ("alone", " returned a float32 [2, 3, 8]; expected the pair (outputs, metrics)."),
        ("name", ": metric_names declares open, but a call returned opened. Give both the same names."),
        ("vector", ": metric open is a float32 [2, 3, 8]; expected a float32 scalar tensor."),
        ("count", ": metric open is an int32 scalar tensor; expected a float32 scalar tensor."),
    ],
)
def test_a_malformed_result_names_the_layer(mistake, message):
    """TensorFlow would name two numbers and an addition, or broadcast; curves of other metrics would be zeros."""
    arguments = {}, tf.ones((2, 3, 8)), tf.zeros((2, 3), tf.bool), Context(scope="decoder/layer_0/feed_forward/")
    with FEED_FORWARDS.isolated():
        call_feed_forward(malformed("right"), *arguments)
        with pytest.raises(UserError, match=re.escape(f"feed-forward layer 'malformed'{message}")):
            call_feed_forward(malformed(mistake), *arguments)
        with pytest.raises(KeyError, match="boom") as raised:
            call_feed_forward(malformed("boom"), *arguments)
    place = "feed-forward layer 'malformed' in decoder/layer_0/feed_forward: KeyError: 'boom' "
    assert raised.value.__notes__[0].startswith(place)


@pytest.mark.parametrize(
    "mistake, message",
    [
        ("list", "the tree of weights is a list; expected a dict"),
        ("norm", "the enclosing layer has a weight named norm; choose another name"),
        ("axis", "weight w: logical axis 'Q' of 'Q' is not one of"),
        ("array", r"weight w/v is a float64 \[8\]; expected a Weight"),
    ],
)
def test_malformed_weights_name_the_layer(mistake, message):
    """One named norm would replace that of the enclosing layer without a word."""
    assert feed_forward_weights(LAYER) == LAYER.weights()
    with FEED_FORWARDS.isolated(), pytest.raises(UserError, match=f"^feed-forward layer 'malformed': {message}"):
        feed_forward_weights(malformed(mistake))


def test_a_malformed_layer_is_not_registered():
    """`definitions` has the tests of what is checked."""
    cls = type("Own", (Malformed,), {"__call__": lambda self, theta, inputs, context: None})
    with pytest.raises(UserError, match="^feed-forward layer 'own': __call__ takes .*, as FeedForward in"):
        register_feed_forward("own")(cls)
    assert "own" not in FEED_FORWARDS.names()
