"""Compaction computes what the experts' networks compute of all positions, on any mesh, and drops no token."""

from __future__ import annotations

import dataclasses
import functools
import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

from lingvo_moe.layers.mixture_of_experts import MixtureOfExperts
from lingvo_moe.lazy import tf
from lingvo_moe.ops.compaction import apply_compacted, rows_of_a_pass
from lingvo_moe.ops.context import Context
from lingvo_moe.ops.dispatch import DISPATCHES
from lingvo_moe.sharding.layout import DeviceMesh, Layout
from lingvo_moe.testing import harness

pytestmark = pytest.mark.slow

MODEL, HIDDEN, EXPERTS, GROUPS, SIZE = 8, 64, 32, 8, 16
# Relative to the largest element: products over M = 8, H = 64, in another order where rows are others.
TOLERANCE = 16 * harness.FLOAT32_ROUNDING
# Rounded before and after the one-hot products, which change nothing, and once more for the combine weights.
BFLOAT16_TOLERANCE = 4 * harness.BFLOAT16_ROUNDING

LOGITS = {
    "anyone": lambda random, shape: random.normal(size=shape),
    # About 100 rows in each of two experts, and none in the others: seven passes of 16 rows.
    "all the same two": lambda random, shape: 50.0 * np.arange(shape[-1]) + np.zeros(shape),
    "each group its own": lambda random, shape: 50.0 * (np.arange(shape[0])[:, None] == np.arange(shape[-1])),
}
LOGICAL_AXES = {"theta/gate": "me", "theta/wi": "EMH", "theta/wo": "EHM", "inputs": "BTM", "outputs": "BTM"}
LOGICAL_AXES |= {"theta/wi_bias": "EH", "theta/wo_bias": "EM"}


@hypothesis.given(strategies.data())
@hypothesis.settings(max_examples=60)
def test_every_used_position_is_computed_once_and_no_other(data):
    """Any number of experts, groups, positions and rows of a pass; a position's number says which it is."""
    experts, groups, capacity, rows = (data.draw(strategies.integers(1, most)) for most in (3, 3, 4, 5))
    drawn = data.draw(strategies.lists(strategies.booleans(), min_size=(n := experts * groups * capacity), max_size=n))
    used = np.reshape(drawn, (experts, groups, capacity))
    buffers = np.arange(1, 2 * n + 1, dtype=np.float32).reshape(*used.shape, 2)
    passes = []

    def network(compacted: tf.Tensor, context: Context) -> tf.Tensor:
        passes.append(compacted.numpy())
        return 10 * compacted

    outputs = apply_compacted(network, tf.constant(buffers), tf.constant(used), rows, Context())
    np.testing.assert_array_equal(outputs, np.where(used[..., None], 10 * buffers, buffers))
    assert len(passes) == math.ceil(used.sum(axis=(1, 2)).max() / rows)
    assert all(found.shape == (experts, 1, rows, 2) for found in passes)


def test_no_pass_is_made_where_no_position_is_used():
    """As in a step in which all tokens are paddings, or of searches that have ended."""
    buffers = tf.zeros((2, 2, 3, 4))
    outputs = apply_compacted(pytest.fail, buffers, tf.zeros((2, 2, 3), tf.bool), 8, Context())
    np.testing.assert_array_equal(outputs, buffers)


def test_the_checkpoint_policy_sees_nothing_of_the_loop():
    """Layers have one in inference, too; a tensor of the loop that it saved could not be read after the loop."""
    context = Context(checkpoint_policy=lambda *_: pytest.fail("called"))
    buffers, used = tf.ones((2, 2, 3, 4)), tf.ones((2, 2, 3), tf.bool)

    def network(compacted: tf.Tensor, inner: Context) -> tf.Tensor:
        return inner.checkpoint_name(compacted, "hidden", "EGCM")

    np.testing.assert_array_equal(apply_compacted(network, buffers, used, 8, context), buffers)


def layer_of(**changes) -> MixtureOfExperts:
    sizes = {"model_dim": MODEL, "hidden_dim": HIDDEN, "num_experts": EXPERTS, "num_groups": GROUPS, "biases": True}
    return MixtureOfExperts(**(sizes | changes))


def inputs_of(layer: MixtureOfExperts, logits: str = "anyone") -> dict:
    """Random weights and tokens; the gate reads the choice from the tokens, which hold it in their first numbers."""
    random = np.random.default_rng(0)
    theta = {
        name: ((weight.stddev or 0.5) * random.normal(size=weight.shape)).astype(np.float32)
        for name, weight in layer.weights().items()
    }
    chosen = LOGITS[logits](random, (GROUPS, layer.num_experts)) @ np.linalg.pinv(theta["gate"])
    inputs = random.normal(size=(GROUPS, SIZE, MODEL)) + chosen[:, None]
    return {"theta": theta, "inputs": inputs.astype(np.float32), "paddings": random.random((GROUPS, SIZE)) < 0.2}


def call(layer: MixtureOfExperts, layout: Layout = Layout(), dtype: str = "float32"):
    def function(inputs: dict) -> dict:
        called = Context(layout, dtype=dtype, platform="cpu")
        outputs, _ = layer(inputs["theta"], called.cast(inputs["inputs"]), inputs["paddings"], called)
        return {"outputs": tf.cast(outputs, tf.float32)}

    return function


def loops(executable) -> bool:
    return " while(" in executable.hlo()


@functools.cache
def unpartitioned(logits: str) -> np.ndarray:
    """On one device, where all positions are computed."""
    layer = layer_of(dispatch="einsum")
    executable = harness.compile_for(call(layer), inputs_of(layer))
    assert not loops(executable)
    return harness.arrays(executable(inputs_of(layer, logits)))["outputs"]


@functools.cache
def compiled(mesh: str, dispatch: str, dtype: str = "float32"):
    layer, layout = layer_of(dispatch=dispatch), Layout.of(DeviceMesh.parse(mesh))
    return harness.compile_for(call(layer, layout, dtype), inputs_of(layer), layout, LOGICAL_AXES)


@pytest.mark.parametrize("logits", LOGITS)
@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize("mesh", ["2", "8", "4x2"])
def test_partitioned_equals_unpartitioned(mesh, dispatch, logits):
    """With one pass and with seven, with experts that have no token, and with the model dimension sharded, too."""
    executable, expected = compiled(mesh, dispatch), unpartitioned(logits)
    assert loops(executable)
    found = harness.arrays(executable(inputs_of(layer_of(), logits)))["outputs"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())
    assert harness.collectives(executable)["all-to-all"] == 3, "there and back, and which positions are used"


def test_partitioned_equals_unpartitioned_in_bfloat16():
    """Activations of MoE(2048E, 60L)."""
    expected = unpartitioned("anyone")
    executable = compiled("4", "einsum", "bfloat16")
    assert loops(executable)
    found = harness.arrays(executable(inputs_of(layer_of())))["outputs"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=BFLOAT16_TOLERANCE * np.abs(expected).max())


@pytest.mark.parametrize("router", ["switch", "top_k:k=2"])
def test_equals_all_positions_for_any_number_of_choices(router):
    """One expert for each token, and two."""
    layer, layout = layer_of(router=router, dispatch="einsum"), Layout.of(DeviceMesh((4,)))
    inputs = inputs_of(layer)
    executable = harness.compile_for(call(layer, layout), inputs, layout, LOGICAL_AXES)
    found, expected = harness.arrays(executable(inputs))["outputs"], harness.run(call(layer), inputs)["outputs"]
    assert loops(executable)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


def test_only_mostly_empty_buffers_of_several_devices_are_compacted():
    """A loop of unknown length has no gradient, and pipeline stages cannot vectorise it."""
    devices = Layout.of(DeviceMesh((8,)))
    inference, training = Context(devices), Context(devices, tf.constant([0, 1]))
    on_cpus = Context(devices, platform="cpu")
    assert rows_of_a_pass(256, 2048 * 8, 8192, inference) == 512, "a step of decoding of MoE(2048E, 36L)"
    assert rows_of_a_pass(32, 512, 8192, inference) is None, "a step of MoE(10B, 32E): the weights' time"
    assert rows_of_a_pass(32, 512, 8192, on_cpus) == 64
    assert rows_of_a_pass(0.5, 64, 64, on_cpus) == 8, "at least a tile"
    assert rows_of_a_pass(13, 128, 64, on_cpus) is None, "32 rows would cost a quarter, and one-hot products a half"
    assert rows_of_a_pass(8192, 2048 * 16, 8192, inference) is None, "the encoder"
    vectorized = dataclasses.replace(inference, layout=devices.vectorized("L"))
    sharded = [Context(Layout.of(DeviceMesh((4, 2)), rules)) for rules in ("BG:x,E:y", "BGE:x,C:y")]
    for context in (training, Context(), vectorized, *sharded):
        assert rows_of_a_pass(256, 2048 * 8, 8192, context) is None


def test_expert_choice_fills_its_buffers():
    """Each takes a token of every group, though by their mean number a quarter of the positions would be used."""
    layer = layer_of(router="expert_choice:choices_per_token=2", num_groups=64)
    layout = Layout.of(DeviceMesh((8,)))
    assert not loops(harness.compile_for(call(layer, layout), inputs_of(layer), layout, LOGICAL_AXES))
