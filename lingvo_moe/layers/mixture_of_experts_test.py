"""The layer computes what a loop over tokens computes, on any mesh, and communicates as the papers say."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import pytest

from lingvo_moe import tree
from lingvo_moe.errors import UserError
from lingvo_moe.layers.base import Context
from lingvo_moe.layers.mixture_of_experts import MixtureOfExperts
from lingvo_moe.layers.repeat import repeat
from lingvo_moe.layers.routers import top_2
from lingvo_moe.layers.routers.base import expert_capacity
from lingvo_moe.lazy import tf
from lingvo_moe.ops.dispatch import DISPATCHES
from lingvo_moe.ops.vectorize import vectorize
from lingvo_moe.sharding.layout import DeviceMesh, Layout
from lingvo_moe.testing import harness

pytestmark = pytest.mark.slow

BATCH, LENGTH, MODEL, HIDDEN, EXPERTS, GROUPS = 8, 4, 8, 16, 8, 8

# Relative to the largest element: products over M = 8, H = 16 and at most 32 tokens, summed in another order.
TOLERANCE = 16 * harness.FLOAT32_ROUNDING
# The same products of numbers with 8 bits of mantissa.
BFLOAT16_TOLERANCE = 4 * harness.BFLOAT16_ROUNDING


def layer_of(**changes) -> MixtureOfExperts:
    """With biases, which NLLB-MoE's have and the papers' have not."""
    fields = {"model_dim": MODEL, "hidden_dim": HIDDEN, "num_experts": EXPERTS, "num_groups": GROUPS, "biases": True}
    return MixtureOfExperts(**(fields | changes))


def inputs_of(layer: MixtureOfExperts, batch: int = BATCH, length: int = LENGTH, padded: float = 0.2) -> dict:
    """Random weights, tokens and paddings."""
    random = np.random.default_rng(0)
    theta = {
        name: ((weight.stddev or 0.5) * random.normal(size=weight.shape)).astype(np.float32)
        for name, weight in layer.weights().items()
    }
    theta["gate"] *= 3  # sharper gates: both large and small second choices
    return {
        "theta": theta,
        "inputs": random.normal(size=(batch, length, MODEL)).astype(np.float32),
        "paddings": random.random((batch, length)) < padded,
        "seed": np.int32([3, 4]),
    }


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
    capacity = expert_capacity(tokens.shape[1], layer.num_experts, factor)
    routing = top_2.route(tf.constant(gates, tf.float32), inputs["paddings"].reshape(groups, -1), capacity, context)
    outputs = np.zeros(tokens.shape)
    for g, s in np.ndindex(tokens.shape[:2]):
        for expert, weight in zip(routing.experts[g, s].numpy(), routing.weights[g, s].numpy()):
            wi_bias, wo_bias = (theta[name][expert] if layer.biases else 0.0 for name in ("wi_bias", "wo_bias"))
            hidden = np.maximum(0, tokens[g, s] @ theta["wi"][expert] + wi_bias)
            outputs[g, s] += weight * (hidden @ theta["wo"][expert] + wo_bias)
    return outputs.reshape(inputs["inputs"].shape)


def assert_close(actual: np.ndarray, expected: np.ndarray, tolerance: float = TOLERANCE):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * max(np.abs(expected).max(), 1e-9))


@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("experts, groups, factor", [(8, 8, 2.0), (2, 1, 1.0), (16, 4, 2.0), (4, 2, None)])
def test_equals_a_loop_over_tokens(experts, groups, factor, training, dispatch):
    layer = layer_of(
        biases=experts > 2,
        num_experts=experts,
        num_groups=groups,
        capacity_factor=factor,
        inference_capacity_factor=factor,
        dispatch=dispatch,
    )
    inputs = inputs_of(layer)
    context = Context(seed=tf.constant(inputs["seed"]) if training else None)
    found = call(layer, training=training)(tree.map_leaves(tf.constant, inputs))
    assert_close(found["outputs"].numpy(), token_by_token(layer, inputs, factor, context))
    assert set(found["metrics"]) == set(layer.metric_names)


def test_tokens_that_overflow_and_paddings_get_zeros():
    """All tokens are equal and choose the same two experts, each of which has one position."""
    layer = layer_of(num_groups=1, inference_capacity_factor=EXPERTS / (BATCH * LENGTH))
    inputs = inputs_of(layer, padded=0.0)
    inputs["inputs"][:] = inputs["inputs"][0, 0]
    inputs["paddings"][0, 0] = True
    found = call(layer, training=False)(tree.map_leaves(tf.constant, inputs))
    outputs = found["outputs"].numpy().reshape(-1, MODEL)
    assert np.abs(outputs[1]).max() > 0.1, "the first present token takes the positions"
    assert not outputs[0].any() and not outputs[2:].any()
    np.testing.assert_allclose(found["metrics"]["overflow"], 30 / 31, rtol=TOLERANCE)


def test_minimal_capacity_is_for_inference_alone():
    """All tokens choose the same two experts: of a group's four, two are dispatched in inference, one in training."""
    layer = layer_of(inference_num_groups=2, num_groups=2, inference_capacity_factor=0.1, inference_min_capacity=2)
    layer = dataclasses.replace(layer, capacity_factor=0.1)
    inputs = inputs_of(layer, batch=2, length=4, padded=0.0)
    inputs["inputs"][:] = inputs["inputs"][0, 0]
    inputs["paddings"][0, 1] = True
    tensors = tree.map_leaves(tf.constant, inputs)
    used = call(layer, training=False)(tensors)["outputs"].numpy().any(axis=-1)
    np.testing.assert_array_equal(used, [[True, False, True, False], [True, True, False, False]])
    used = call(layer)(tensors)["outputs"].numpy().any(axis=-1)
    np.testing.assert_array_equal(used, [[True, False, False, False], [True, False, False, False]])


def test_minimal_capacity_does_not_change_what_experts_choose():
    """With expert choice, an expert with more positions would take more tokens than in training."""
    layer = layer_of(router="expert_choice:choices_per_token=1", inference_min_capacity=0)
    inputs = tree.map_leaves(tf.constant, inputs_of(layer, batch=2, length=8, padded=0.0))
    expected = call(layer, training=False)(inputs)["outputs"].numpy()
    raised = call(dataclasses.replace(layer, inference_min_capacity=8), training=False)(inputs)["outputs"].numpy()
    np.testing.assert_array_equal(raised, expected)


def test_groups_of_inference_are_not_those_of_training():
    """Eight equal tokens, capacity for one of a group: as many are dispatched as there are groups."""
    layer = layer_of(num_groups=8, inference_num_groups=2, capacity_factor=0.1, inference_capacity_factor=0.1)
    inputs = inputs_of(layer, batch=2, length=4, padded=0.0)
    inputs["inputs"][:] = inputs["inputs"][0, 0]
    for training, groups in ((True, 8), (False, 2)):
        outputs = call(layer, training=training)(tree.map_leaves(tf.constant, inputs))["outputs"].numpy()
        assert outputs.any(axis=-1).sum() == groups


def test_inference_without_a_capacity_depends_on_no_other_token():
    layer = layer_of(num_groups=1)
    inputs = inputs_of(layer)
    together = call(layer, training=False)(tree.map_leaves(tf.constant, inputs))["outputs"]
    alone = []
    for b in range(BATCH):
        one = inputs | {name: inputs[name][b : b + 1] for name in ("inputs", "paddings")}
        alone.append(call(layer, training=False)(tree.map_leaves(tf.constant, one))["outputs"][0])
    assert_close(together.numpy(), np.stack(alone))


def test_groups_fit_a_batch_that_they_do_not_divide():
    """6 tokens in 4 groups: gcd(6, 4) = 2 groups of 3."""
    layer = layer_of(num_groups=4)
    inputs = inputs_of(layer, batch=3, length=2)
    found = call(layer, training=False)(tree.map_leaves(tf.constant, inputs))
    assert_close(found["outputs"].numpy(), token_by_token(layer, inputs, None, Context()))


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_bfloat16_activations_keep_more_than_256_tokens_apart(dispatch):
    """600 tokens of one group in two experts: if positions were counted in bfloat16, tokens would share them."""
    layer = layer_of(num_experts=2, num_groups=1, dispatch=dispatch)
    inputs = inputs_of(layer, batch=6, length=100)
    found = call(layer, training=False, dtype="bfloat16")(tree.map_leaves(tf.constant, inputs))["outputs"].numpy()
    rounded = inputs | {"inputs": tf.cast(tf.cast(inputs["inputs"], tf.bfloat16), tf.float32).numpy()}
    assert_close(found, token_by_token(layer, rounded, None, Context()), BFLOAT16_TOLERANCE)


LOGICAL_AXES = {f"theta/{name}": weight.logical_axes for name, weight in layer_of().weights().items()}
LOGICAL_AXES |= {"inputs": "BTM", "paddings": "BT"}
LOGICAL_AXES |= {f"gradients/{path}": logical_axes for path, logical_axes in LOGICAL_AXES.items()}
LOGICAL_AXES |= {"values/outputs": "BTM", "outputs": "BTM"}


# Devices with several experts each, with one each, and on two axes.
MESHES = ["2", "4", "8", "4x2"]


@functools.cache
def compiled(dispatch: str, mesh: str, backward: bool = True):
    """The layer on a mesh, alone or with its gradients."""
    layer, layout = layer_of(dispatch=dispatch), Layout.of(DeviceMesh.parse(mesh))
    function = harness.with_gradients(call(layer, layout)) if backward else call(layer, layout)
    return harness.compile_for(function, inputs_of(layer), layout, LOGICAL_AXES)


@functools.cache
def unpartitioned() -> dict:
    return harness.arrays(compiled("einsum", "1")(inputs_of(layer_of())))


@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize("mesh", MESHES)
def test_partitioned_equals_unpartitioned(mesh, dispatch):
    """Value, metrics and every gradient, with capacity cuts and random routing."""
    assert unpartitioned()["values/metrics/overflow"] > 0, "the case has overflow in it"
    found = harness.arrays(compiled(dispatch, mesh)(inputs_of(layer_of())))
    for path, expected in unpartitioned().items():
        assert_close(found[path], expected)


@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize("mesh", MESHES)
def test_communication_of_one_layer(mesh, dispatch):
    """Two AllToAll forward and two more backward (GShard section 3.3).

    On one mesh axis no mask, token or expert is gathered; on two, the model dimension of activations is gathered (GSPMD
    section 5.1, "2D finalized").
    """
    forward, both = (harness.collectives(compiled(dispatch, mesh, backward)) for backward in (False, True))
    assert (forward["all-to-all"], both["all-to-all"]) == (2, 4)
    if "x" not in mesh:
        assert set(forward) | set(both) <= {"all-to-all", "all-reduce"}


@pytest.mark.parametrize("mesh, way", [("8", {}), ("4x2", {"remat": "keep_outputs"})])
def test_gather_in_repeated_layers(mesh, way):
    """Manual mode and its gradients inside loops: equal to the einsum, layer after layer."""
    inputs = inputs_of(layer_of())
    inputs["theta"] = {name: np.stack([value, value[::-1]]) for name, value in inputs["theta"].items()}

    def stack(layer: MixtureOfExperts, layout: Layout = Layout(), **way):
        def function(inputs: dict) -> dict:
            def body(theta: dict, tokens: tf.Tensor, constants: dict, context: Context):
                outputs, metrics = layer(theta, tokens, inputs["paddings"], context)
                return tokens + outputs, metrics

            weights = {name: weight.repeated(2) for name, weight in layer.weights().items()}
            context = Context(layout, inputs["seed"])
            outputs, metrics = repeat(
                body, weights, inputs["theta"], inputs["inputs"], {}, context, metric_names=layer.metric_names, **way
            )
            return {"outputs": outputs, "metrics": metrics}

        return harness.with_gradients(function)

    layout = Layout.of(DeviceMesh.parse(mesh))
    logical_axes = {path: f"R{names}" if "theta" in path else names for path, names in LOGICAL_AXES.items()}
    found = harness.run(stack(layer_of(dispatch="gather"), layout, **way), inputs, layout, logical_axes)
    expected = stack(layer_of(), unroll=True)(tree.map_leaves(tf.constant, inputs))
    for path, value in harness.arrays(expected).items():
        assert_close(found[path], value)


def test_groups_that_devices_do_not_divide():
    """4 x 1 tokens in gcd(4, 8) = 4 groups on 8 devices: XLA pads einsums; gathers, which cannot be padded, say so."""
    layout = Layout.of(DeviceMesh((8,)))
    inputs = inputs_of(layer_of(), batch=4, length=1)
    harness.lower_for(call(layer_of(), layout), inputs, layout)
    with pytest.raises(UserError, match="8 devices do not divide the 4 groups of this batch. Make num_groups"):
        harness.lower_for(call(layer_of(dispatch="gather"), layout), inputs, layout)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"hidden_dim": 0}, "layer moe: hidden_dim is 0; expected at least 1"),
        ({"num_groups": -3}, "layer moe: num_groups is -3; expected at least 1"),
        ({"capacity_factor": math.nan}, "layer moe: capacity_factor is nan; expected a number above 0"),
        ({"capacity_factor": math.inf}, "layer moe: capacity_factor is inf; expected a number above 0"),
        ({"inference_capacity_factor": math.nan}, "layer moe: inference_capacity_factor is nan; expected at least 0"),
    ],
)
def test_a_field_out_of_range_is_an_error(changes, message):
    """A layer pattern may set any of them: `moe:capacity_factor=inf`."""
    with pytest.raises(UserError, match=message):
        layer_of(**changes)


def test_unknown_dispatch_is_an_error_that_names_it():
    with pytest.raises(UserError, match="dispatch is 'einsums'; use one of auto, einsum, gather. Did you mean einsum?"):
        layer_of(dispatch="einsums")


def test_weights_are_the_papers():
    """E * 2 * M * H in the experts, M * E in the gate; the gate is replicated, experts are sharded along E."""
    layer = layer_of(biases=False)
    assert layer.num_weights() == EXPERTS * 2 * MODEL * HIDDEN + MODEL * EXPERTS
    layout = Layout.of(DeviceMesh((8,)))
    sharding = {name: layout.mesh_axes(weight.logical_axes) for name, weight in layer.weights().items()}
    assert sharding == {"gate": (None, None), "wi": ("x", None, None), "wo": ("x", None, None)}


@pytest.mark.parametrize("router", ["top2", "switch", "top_k", "expert_choice"])
def test_it_can_be_a_stage_of_a_pipeline(router):
    """Vectorised over stages it has the values and gradients of each stage by itself."""
    layer = layer_of(router=router)
    stages = [inputs_of(layer), inputs_of(layer, padded=0.5)]
    stages[1]["inputs"] = stages[1]["inputs"][::-1]

    def one(theta: dict, inputs: tf.Tensor, paddings: tf.Tensor, seed: tf.Tensor) -> tuple:
        with tf.GradientTape() as tape:
            tape.watch([inputs, theta])
            outputs = tf.sin(layer(theta, inputs, paddings, Context(seed=seed, platform="tpu"))[0])
        return outputs, *tape.gradient(outputs, [inputs, theta["gate"], theta["wi"]])

    def function(inputs: dict) -> dict:
        arguments = tuple(inputs[name] for name in ("theta", "inputs", "paddings", "seed"))
        loop = [one(*tf.nest.map_structure(lambda tensor, i=i: tensor[i], arguments)) for i in range(2)]
        pairs = zip(vectorize(one, arguments), zip(*loop))
        return {f"{index}": {"vectorized": both, "loop": tf.stack(each)} for index, (both, each) in enumerate(pairs)}

    found = harness.run(function, tf.nest.map_structure(lambda *parts: np.stack(parts), *stages))
    for index in range(4):
        expected = found[f"{index}/loop"]
        atol = TOLERANCE * np.abs(expected).max()
        np.testing.assert_allclose(found[f"{index}/vectorized"], expected, rtol=0, atol=atol, err_msg=f"{index}")


@pytest.mark.parametrize("dispatch", sorted(DISPATCHES))
def test_a_call_outside_of_a_program_takes_numpys_arrays(dispatch):
    """To look at intermediate values; the result is the program's."""
    layer = layer_of(dispatch=dispatch)
    inputs = inputs_of(layer)
    expected = harness.run(call(layer), inputs)["outputs"]
    outputs, _ = layer(inputs["theta"], inputs["inputs"], inputs["paddings"], Context(seed=inputs["seed"]))
    np.testing.assert_allclose(outputs, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


def test_a_router_that_returns_other_metrics_than_it_declares_is_named(monkeypatch):
    """The layer's own metrics are its router's, so an error would otherwise name the layer."""
    monkeypatch.setattr(top_2.Top2, "metric_names", ("aux_loss", "overflows"))
    layer = layer_of()
    with pytest.raises(
        UserError, match="^router 'top2': metric_names declares aux_loss, overflows, but .* overflow, second"
    ):
        call(layer)(tree.map_leaves(tf.constant, inputs_of(layer)))


@pytest.mark.parametrize("dispatch", sorted(DISPATCHES))
@pytest.mark.parametrize("router", ["top2", "switch", "top_k:k=2", "expert_choice"])
def test_a_group_with_nan_changes_no_other_group(router, dispatch):
    """Its choices would otherwise take positions beyond its buffers, which are those of the next group."""
    layer = layer_of(router=router, dispatch=dispatch)
    inputs = inputs_of(layer)
    expected = harness.run(call(layer, training=False), inputs)["outputs"]
    broken = {**inputs, "inputs": inputs["inputs"].copy()}
    broken["inputs"][0] = np.nan
    found = harness.run(call(layer, training=False), broken)["outputs"]
    np.testing.assert_array_equal(found[1:], expected[1:])
