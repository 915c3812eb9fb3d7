"""Both dispatches carry the same rows, forward and backward and on any mesh; `gather` has no one-hot tensors."""

from __future__ import annotations

import functools
import math
import re

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from lingvo_moe import tree
from lingvo_moe.errors import UserError
from lingvo_moe.layers.routers import top_2
from lingvo_moe.lazy import tf
from lingvo_moe.ops.context import Context
from lingvo_moe.ops.dispatch import AUTO, DISPATCHES, Gather, check_dispatch, choose
from lingvo_moe.sharding.layout import DeviceMesh, Layout
from lingvo_moe.testing import harness

MODEL = 4
# A combined token is a sum of two products. One way rounds each product and the sum, the other may fuse a product into
# it: two roundings apart. The products may cancel, so it is relative to the largest element and not to each.
TOLERANCE = 4 * harness.FLOAT32_ROUNDING
# The gradient of a weight is a product over M = 4 and goes on through a softmax and a normalisation: some ten
# roundings.
GATES_TOLERANCE = 16 * harness.FLOAT32_ROUNDING
# `einsum` rounds weights to the dtype of activations, `gather` does not.
BFLOAT16_TOLERANCE = 4 * harness.BFLOAT16_ROUNDING
# Gradients below this size, of tokens and scales of size 1, are those of gates that are 0 or 1 up to 1e-8.
SATURATED = 1e-8

LOGITS = {
    "random": lambda random, shape: random.normal(size=shape),
    "to one expert": lambda random, shape: random.normal(size=shape) + 50.0 * (np.arange(shape[-1]) == shape[-1] - 1),
    "alike": lambda random, shape: np.zeros(shape),
}
PADDINGS = {"none": 0.0, "some": 0.4, "all": 1.1}


def inputs_of(
    groups: int, size: int, num_experts: int, logits: str = "random", paddings: str = "some", number: int = 0
) -> dict:
    """Tokens, the gates' logits, paddings, a scale for each expert, and the seed of random routing."""
    random = np.random.default_rng(number)
    return {
        "tokens": random.normal(size=(groups, size, MODEL)).astype(np.float32),
        "logits": LOGITS[logits](random, (groups, size, num_experts)).astype(np.float32),
        "paddings": random.random((groups, size)) < PADDINGS[paddings],
        "scales": random.normal(size=(num_experts, MODEL)).astype(np.float32),
        "seed": np.int32([number, 1]),
    }


def call(way: str, capacity: int, layout: Layout = Layout(), training: bool = True, dtype: str = "float32"):
    """Routes, dispatches, scales each expert's positions by a vector of its own, and combines; with gradients."""

    def function(inputs: dict) -> dict:
        context = Context(layout, inputs["seed"] if training else None, dtype)
        num_experts = inputs["logits"].shape[-1]
        gates = context.annotate(tf.nn.softmax(inputs["logits"]), "GSE")
        routing = top_2.route(gates, inputs["paddings"], capacity, context)
        with tf.name_scope("dispatch"):
            positions = DISPATCHES[way](routing, num_experts, capacity, context)
            dispatched = positions.dispatch(context.annotate(context.cast(inputs["tokens"]), "GSM"))
        outputs = tf.einsum("GECM,EM->GECM", dispatched, context.cast(inputs["scales"]))
        with tf.name_scope("combine"):
            combined = positions.combine(context.annotate(outputs, "GECM"))
        return {"dispatched": tf.cast(dispatched, tf.float32), "combined": tf.cast(combined, tf.float32)}

    return harness.with_gradients(function)


def assert_close(actual: np.ndarray, expected: np.ndarray, tolerance: float, path: str):
    # The gradient through a saturated softmax is a difference of equal terms, whose rounding may be all of it.
    scale = max(np.abs(expected).max(), SATURATED)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * scale, err_msg=path)


def assert_equal(found: dict, expected: dict):
    """Dispatched rows are equal bit for bit; computed values up to the tolerances above."""
    np.testing.assert_array_equal(found["values/dispatched"], expected["values/dispatched"])
    for path, value in expected.items():
        if path == "gradients/logits":
            # A difference of terms of the size of the gradients by tokens: a token's weights always sum to 1.
            atol = GATES_TOLERANCE * max(np.abs(expected[name]).max() for name in (path, "gradients/tokens"))
            np.testing.assert_allclose(found[path], value, rtol=0, atol=atol, err_msg=path)
        else:
            assert_close(found[path], value, TOLERANCE, path)


def check(inputs: dict, capacity: int, training: bool):
    """Compares both ways, eagerly."""
    found, expected = (
        harness.arrays(call(way, capacity, training=training)(tree.map_leaves(tf.constant, inputs)))
        for way in ("gather", "einsum")
    )
    assert_equal(found, expected)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("paddings", PADDINGS)
@pytest.mark.parametrize("logits", LOGITS)
@pytest.mark.parametrize(
    "size, num_experts, capacity", [(8, 4, 4), (8, 4, 1), (8, 2, 8), (3, 7, 1), (3, 7, 3), (1, 2, 1)]
)
def test_gather_equals_einsum(size, num_experts, capacity, logits, paddings, training):
    """With and without overflow, ties, one position per expert, paddings alone, and all tokens to one expert."""
    check(inputs_of(2, size, num_experts, logits, paddings), capacity, training)


@pytest.mark.slow
@hypothesis.given(data=strategies.data())
def test_gather_equals_einsum_for_any_routing(data):
    groups, size, num_experts = (data.draw(strategies.integers(low, high)) for low, high in ((1, 3), (1, 12), (2, 9)))
    logits, paddings = (data.draw(strategies.sampled_from(sorted(choices))) for choices in (LOGITS, PADDINGS))
    inputs = inputs_of(groups, size, num_experts, logits, paddings, data.draw(strategies.integers(0, 2**16)))
    check(inputs, data.draw(strategies.integers(1, size)), data.draw(strategies.booleans()))


def test_each_position_holds_the_token_routed_to_it():
    """Against a plain loop over choices: tokens are carried to their positions, and nowhere else."""
    groups, size, num_experts, capacity = 2, 8, 3, 2
    inputs = inputs_of(groups, size, num_experts)
    routing = top_2.route(tf.nn.softmax(inputs["logits"]), tf.constant(inputs["paddings"]), capacity, Context())
    tokens = 1.0 + np.arange(groups * size, dtype=np.float32).reshape(groups, size, 1)
    expected = np.zeros((groups, num_experts, capacity, 1))
    for g, s, k in np.argwhere(routing.weights.numpy() > 0):
        expected[g, routing.experts[g, s, k], routing.positions[g, s, k]] = tokens[g, s]
    found = Gather(routing, num_experts, capacity, Context()).dispatch(tf.constant(tokens))
    np.testing.assert_array_equal(found, expected)
    assert 0 < np.count_nonzero(expected) < 2 * np.count_nonzero(~inputs["paddings"]), "some choices overflowed"


@pytest.mark.parametrize("logits", LOGITS)
def test_bfloat16_activations(logits):
    """The rows themselves are equal; their weighted sums as far as the rounding of weights allows."""
    inputs = tree.map_leaves(tf.constant, inputs_of(2, 12, 4, logits))
    found, expected = (harness.arrays(call(way, 4, dtype="bfloat16")(inputs)) for way in ("gather", "einsum"))
    np.testing.assert_array_equal(found["values/dispatched"], expected["values/dispatched"])
    for path, value in expected.items():
        assert_close(found[path], value, BFLOAT16_TOLERANCE, path)


# G, S, E and C of compiled cases: the one-hot tensor is larger than all others.
GROUPS, SIZE, EXPERTS, CAPACITY = 8, 64, 8, 12
LOGICAL_AXES = {"tokens": "GSM", "logits": "GSE", "paddings": "GS", "scales": "eM"}
LOGICAL_AXES |= {f"gradients/{path}": logical_axes for path, logical_axes in LOGICAL_AXES.items()}
LOGICAL_AXES |= {"values/dispatched": "GECM", "values/combined": "GSM"}
MESHES = ["1", "2", "4", "8", "4x2", "1x2"]


@functools.cache
def compiled(way: str, mesh: str):
    layout = Layout.of(DeviceMesh.parse(mesh))
    return harness.compile_for(call(way, CAPACITY, layout), inputs_of(GROUPS, SIZE, EXPERTS), layout, LOGICAL_AXES)


@functools.cache
def unpartitioned() -> dict:
    return harness.arrays(compiled("einsum", "1")(inputs_of(GROUPS, SIZE, EXPERTS)))


def largest_tensor(way: str, mesh: str) -> int:
    """Elements, per device, of the largest tensor that the compiled module mentions."""
    shapes = re.findall(r"\b(?:pred|bf16|[fsu]\d+)\[([\d,]+)\]", compiled(way, mesh).hlo())
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_partitioned_gather_equals_einsum_on_one_device(mesh):
    """Values and gradients of two meshes' axes: groups along x, rows themselves along y."""
    assert_equal(harness.arrays(compiled("gather", mesh)(inputs_of(GROUPS, SIZE, EXPERTS))), unpartitioned())


@pytest.mark.parametrize("mesh", MESHES)
def test_gather_has_no_one_hot_tensor(mesh):
    one_hot = GROUPS * SIZE * EXPERTS * CAPACITY // DeviceMesh.parse(mesh).shape[0]
    assert largest_tensor("gather", mesh) < one_hot


@pytest.mark.slow
def test_einsum_has_the_one_hot_tensor():
    """The test above would find one."""
    assert largest_tensor("einsum", "8") >= SIZE * EXPERTS * CAPACITY


@pytest.mark.parametrize("mesh", ["8", "4x2"])
def test_gather_moves_no_row_between_devices(mesh):
    """Sums alone cross devices: the gradients of the experts' scales, and of weights where M is sharded."""
    assert set(harness.collectives(compiled("gather", mesh))) == {"all-reduce"}


def test_rows_are_gathered_in_both_passes_in_named_scopes():
    """No row is added in memory: only the integers of the index are scattered.

    `analysis` finds operators by their scopes.
    """
    # The lowered program has the scatters: compilers for CPUs may write them as loops.
    scattered = re.findall(r'"stablehlo\.scatter".*?\) -> tensor<(?:\d+x)*(\w+)>', _lowered("8"), re.DOTALL)
    assert set(scattered) == {"i32"}
    found = re.findall(r" (\w+)\[([\d,]*)\]\S* gather\(.*op_name=\"([^\"]*)\"", compiled("gather", "8").hlo())
    assert {dtype for dtype, *_ in found} == {"f32"}
    rows = [name for _, shape, name in found if shape.endswith(f",{MODEL}")]
    assert sum("dispatch" in name for name in rows) == 2, "one in each pass"
    assert sum("combine" in name for name in rows) == 2
    assert len(found) == len(rows) + 1, "the weight of each position, for the gradient"


def _lowered(mesh: str) -> str:
    layout = Layout.of(DeviceMesh.parse(mesh))
    function = call("gather", CAPACITY, layout)
    program = harness.lower_for(function, inputs_of(GROUPS, SIZE, EXPERTS), layout, LOGICAL_AXES)
    with ir.Context() as context:
        stablehlo.register_dialect(context)
        return str(stablehlo.deserialize_portable_artifact(context, program.module))


def test_eager_tensors_are_not_partitioned():
    inputs = tree.map_leaves(tf.constant, inputs_of(3, SIZE, EXPERTS))
    one, many = (harness.arrays(call("gather", CAPACITY, Layout(DeviceMesh((count,))))(inputs)) for count in (1, 4))
    assert all(np.array_equal(one[path], many[path]) for path in one)


@pytest.mark.parametrize(
    "groups, mesh, message",
    [
        (6, "4", "4 devices do not divide the 6 groups of this batch. Make num_groups .* of 4, or set dispatch=einsum"),
        (8, "2x8", "8 devices do not divide model_dim=4. Make it a multiple of 8, or set dispatch=einsum"),
    ],
)
def test_indivisible_groups_are_an_error_with_a_remedy(groups, mesh, message):
    layout = Layout.of(DeviceMesh.parse(mesh))
    with pytest.raises(UserError, match=message):
        harness.lower_for(call("gather", CAPACITY, layout), inputs_of(groups, SIZE, EXPERTS), layout)


def test_unknown_dispatch_is_an_error_that_names_it():
    with pytest.raises(UserError, match="dispatch is 'gathr'; use one of auto, einsum, gather. Did you mean gather?"):
        check_dispatch("gathr")


@pytest.mark.parametrize(
    "platform, size, mesh, expected",
    [
        ("cpu", 128, "1", "gather"),
        ("cpu", 128, "4", "gather"),
        ("cpu", 128, "8", "einsum"),
        ("cpu", 127, "1", "einsum"),
        ("tpu", 128, "1", "einsum"),
        ("", 128, "1", "einsum"),
    ],
)
def test_auto_gathers_large_groups_on_a_cpu_where_devices_divide_them(platform, size, mesh, expected):
    """Both are equal, so `auto` is never an error where only one works; a named one is used."""
    tokens, context = tf.zeros((4, size, 8)), Context(Layout.of(DeviceMesh.parse(mesh)), platform=platform)
    assert choose(AUTO, tokens, context) is DISPATCHES[expected]
    assert all(choose(name, tokens, context) is way for name, way in DISPATCHES.items())
