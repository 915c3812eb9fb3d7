"""The layer computes what a loop over tokens computes, on any mesh, and communicates as the papers say."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lingvo_moe import testing, tree
from lingvo_moe.layers import gating
from lingvo_moe.layers.base import Context
from lingvo_moe.layers.mixture_of_experts import METRICS, MixtureOfExperts
from lingvo_moe.layout import DeviceMesh, Layout
from lingvo_moe.lazy import tf

BATCH, LENGTH, MODEL, HIDDEN, EXPERTS, GROUPS = 8, 4, 8, 16, 8, 8

# Relative to the largest element: products over M = 8, H = 16 and at most 32 tokens, summed in another order.
TOLERANCE = 16 * testing.FLOAT32_ROUNDING
# The same products of numbers with 8 bits of mantissa.
BFLOAT16_TOLERANCE = 4 * testing.BFLOAT16_ROUNDING


def layer_of(**changes) -> MixtureOfExperts:
    fields = {"model_dim": MODEL, "hidden_dim": HIDDEN, "num_experts": EXPERTS, "num_groups": GROUPS}
    return MixtureOfExperts(**(fields | changes))


def inputs_of(layer: MixtureOfExperts, batch: int = BATCH, length: int = LENGTH, padded: float = 0.2) -> dict:
    """Random weights, tokens and paddings."""
    random = np.random.default_rng(0)
    theta = {name: (weight.stddev * random.normal(size=weight.shape)).astype(np.float32)
             for name, weight in layer.weights().items()}
    theta["gate"] *= 3  # decided gates: both large and small second choices
    return {"theta": theta, "inputs": random.normal(size=(batch, length, MODEL)).astype(np.float32),
            "paddings": random.random((batch, length)) < padded, "seed": np.int32([3, 4])}


def call(layer: MixtureOfExperts, layout: Layout = Layout(), training: bool = True, dtype: str = "float32"):
    """The layer as a function of `inputs_of`'s tree."""

    def function(inputs: dict) -> dict:
        context = Context(layout, inputs["seed"] if training else None, dtype)
        outputs, metrics = layer(inputs["theta"], context.cast(inputs["inputs"]), inputs["paddings"], context)
        return {"outputs": tf.cast(outputs, tf.float32), "metrics": metrics}

    return function


def token_by_token(layer: MixtureOfExperts, inputs: dict, factor: float | None, context: Context) -> np.ndarray:
    """y_s = sum of combine weight * FFN_e(x_s) over the experts that took token s; a plain loop."""
    theta = inputs["theta"]
    groups = math.gcd(inputs["paddings"].size, layer.num_groups)
    tokens = inputs["inputs"].reshape(groups, -1, MODEL)
    logits = tokens.astype(np.float64) @ theta["gate"]
    gates = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    capacity = gating.expert_capacity(tokens.shape[1], layer.num_experts, factor)
    routing = gating.route(tf.constant(gates, tf.float32), inputs["paddings"].reshape(groups, -1), capacity, context)
    outputs = np.zeros(tokens.shape)
    for g, s in np.ndindex(tokens.shape[:2]):
        for expert, weight in zip(routing.experts[g, s].numpy(), routing.weights[g, s].numpy()):
            hidden = np.maximum(0, tokens[g, s] @ theta["wi"][expert])
            outputs[g, s] += weight * (hidden @ theta["wo"][expert])
    return outputs.reshape(inputs["inputs"].shape)


def assert_close(actual: np.ndarray, expected: np.ndarray, tolerance: float = TOLERANCE):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * max(np.abs(expected).max(), 1e-9))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("experts, groups, factor", [(8, 8, 2.0), (2, 1, 1.0), (16, 4, 2.0), (4, 2, None)])
def test_equals_a_loop_over_tokens(experts, groups, factor, training):
    layer = layer_of(num_experts=experts, num_groups=groups, capacity_factor=factor, inference_capacity_factor=factor)
    inputs = inputs_of(layer)
    context = Context(seed=tf.constant(inputs["seed"]) if training else None)
    found = call(layer, training=training)(tree.map_leaves(tf.constant, inputs))
    assert_close(found["outputs"].numpy(), token_by_token(layer, inputs, factor, context))
    assert set(found["metrics"]) == set(METRICS)


def test_tokens_that_overflow_and_paddings_get_zeros():
    """All tokens alike want the same two experts; each of the one group's experts has one place."""
    layer = layer_of(num_groups=1, inference_capacity_factor=EXPERTS / (BATCH * LENGTH))
    inputs = inputs_of(layer, padded=0.0)
    inputs["inputs"][:] = inputs["inputs"][0, 0]
    inputs["paddings"][0, 0] = True
    found = call(layer, training=False)(tree.map_leaves(tf.constant, inputs))
    outputs = found["outputs"].numpy().reshape(-1, MODEL)
    assert np.abs(outputs[1]).max() > 0.1, "the first token that is there takes the places"
    assert not outputs[0].any() and not outputs[2:].any()
    np.testing.assert_allclose(found["metrics"]["overflow"], 30 / 31, rtol=TOLERANCE)


def test_inference_without_a_capacity_depends_on_no_other_token():
    layer = layer_of(num_groups=1)
    inputs = inputs_of(layer)
    together = call(layer, training=False)(tree.map_leaves(tf.constant, inputs))["outputs"]
    alone = []
    for b in range(BATCH):
        one = inputs | {name: inputs[name][b:b + 1] for name in ("inputs", "paddings")}
        alone.append(call(layer, training=False)(tree.map_leaves(tf.constant, one))["outputs"][0])
    assert_close(together.numpy(), np.stack(alone))


def test_groups_fit_a_batch_that_they_do_not_divide():
    """6 tokens in 4 groups: gcd(6, 4) = 2 groups of 3."""
    layer = layer_of(num_groups=4)
    inputs = inputs_of(layer, batch=3, length=2)
    found = call(layer, training=False)(tree.map_leaves(tf.constant, inputs))
    assert_close(found["outputs"].numpy(), token_by_token(layer, inputs, None, Context()))


def test_bfloat16_activations_keep_more_than_256_tokens_apart():
    """600 tokens of one group in two experts: were places counted in bfloat16, tokens would share places and add up."""
    layer = layer_of(num_experts=2, num_groups=1)
    inputs = inputs_of(layer, batch=6, length=100)
    found = call(layer, training=False, dtype="bfloat16")(tree.map_leaves(tf.constant, inputs))["outputs"].numpy()
    rounded = inputs | {"inputs": tf.cast(tf.cast(inputs["inputs"], tf.bfloat16), tf.float32).numpy()}
    assert_close(found, token_by_token(layer, rounded, None, Context()), BFLOAT16_TOLERANCE)


LETTERS = {"theta/gate": "me", "theta/wi": "EMH", "theta/wo": "EHM", "inputs": "BTM", "paddings": "BT"}
LETTERS |= {f"gradients/{path}": letters for path, letters in LETTERS.items()} | {"values/outputs": "BTM"}


@pytest.fixture(scope="module")
def unpartitioned() -> dict:
    layer = layer_of()
    return testing.run(testing.with_gradients(call(layer)), inputs_of(layer))


@pytest.mark.parametrize("mesh", ["2", "4", "8", "2x2", "4x2"])
def test_partitioned_equals_unpartitioned(mesh, unpartitioned):
    """Value, metrics and every gradient, with capacity cuts and random routing."""
    layer, layout = layer_of(), Layout.of(DeviceMesh.parse(mesh))
    assert unpartitioned["values/metrics/overflow"] > 0, "the case has overflow in it"
    found = testing.run(testing.with_gradients(call(layer, layout)), inputs_of(layer), layout, LETTERS)
    for path, expected in unpartitioned.items():
        assert_close(found[path], expected)


@pytest.mark.parametrize("mesh", ["2", "4", "8", "4x2"])
def test_communication_of_one_layer(mesh):
    """Two AllToAll forward and two more backward (GShard section 3.3). On one axis nobody gathers masks, tokens or experts;
    on two, the model dimension of activations is gathered (GSPMD section 5.1, "2D finalized")."""
    layer, layout = layer_of(), Layout.of(DeviceMesh.parse(mesh))
    letters = LETTERS | {"outputs": "BTM"}
    forward, both = (
        testing.collectives(testing.compile_for(function, inputs_of(layer), layout, letters))
        for function in (call(layer, layout), testing.with_gradients(call(layer, layout))))
    assert (forward["all-to-all"], both["all-to-all"]) == (2, 4)
    if len(layout.mesh.shape) == 1:
        assert set(forward) | set(both) <= {"all-to-all", "all-reduce"}


def test_weights_are_the_papers():
    """E * 2 * M * H in the experts, M * E in the gate; the gate is whole on every device, experts are cut along E."""
    layer = layer_of()
    assert layer.num_weights() == EXPERTS * 2 * MODEL * HIDDEN + MODEL * EXPERTS
    layout = Layout.of(DeviceMesh((8,)))
    cut = {name: layout.axes(weight.letters) for name, weight in layer.weights().items()}
    assert cut == {"gate": (None, None), "wi": ("x", None, None), "wo": ("x", None, None)}
