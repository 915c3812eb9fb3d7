"""Block-sparse experts compute what buffers with full capacity (C = S) compute, and no unused block."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from lingvo_moe import tree
from lingvo_moe.layers.mixture_of_experts import MixtureOfExperts
from lingvo_moe.lazy import tf
from lingvo_moe.ops.block_sparse import FEW_EXPERTS, BlockSparse, block_size
from lingvo_moe.ops.context import Context
from lingvo_moe.ops.routing import Routing
from lingvo_moe.sharding.layout import DeviceMesh, Layout
from lingvo_moe.testing import harness

pytestmark = pytest.mark.slow

MODEL, HIDDEN = 8, 16
# Relative to the largest element: products over M = 8 and H = 16, which a product of other rows may sum in another
# order.
TOLERANCE = 16 * harness.FLOAT32_ROUNDING
# Buffers round combine weights, and with them each product, to 8 bits of mantissa; blocks do not.
BFLOAT16_TOLERANCE = 4 * harness.BFLOAT16_ROUNDING

CHOICES = {
    "anyone": lambda random, shape: random.normal(size=shape),
    "all the same two": lambda random, shape: 50.0 * np.arange(shape[-1]) + np.zeros(shape),
    "each group its own": lambda random, shape: (
        50.0 * (np.arange(shape[0])[:, None] % shape[-1] == np.arange(shape[-1]))
    ),
}
PADDED = {"none": 0.0, "some": 0.4, "all": 1.1}


def layer_of(num_experts: int, num_groups: int, router: str = "top2", biases: bool = True) -> MixtureOfExperts:
    sizes = {"model_dim": MODEL, "hidden_dim": HIDDEN, "num_experts": num_experts, "num_groups": num_groups}
    return MixtureOfExperts(**sizes, router=router, biases=biases)


def inputs_of(layer: MixtureOfExperts, batch: int, length: int, choices: str = "anyone", padded: str = "some") -> dict:
    """Random weights and tokens; the gate reads the choice from the tokens, which hold it in their first numbers."""
    random = np.random.default_rng(0)
    theta = {
        name: ((weight.stddev or 0.5) * random.normal(size=weight.shape)).astype(np.float32)
        for name, weight in layer.weights().items()
    }
    logits = CHOICES[choices](random, (batch, layer.num_experts))
    inputs = random.normal(size=(batch, length, MODEL)) + (logits @ np.linalg.pinv(theta["gate"]))[:, None]
    return {
        "theta": theta,
        "inputs": inputs.astype(np.float32),
        "paddings": random.random((batch, length)) < PADDED[padded],
    }


def call(layer: MixtureOfExperts, platform: str, dtype: str = "float32", layout: Layout = Layout()):
    """Block-sparse for the platform `cpu`, in buffers for none."""

    def function(inputs: dict) -> dict:
        context = Context(layout, None, dtype, platform=platform)
        return {
            "outputs": tf.cast(
                layer(inputs["theta"], context.cast(inputs["inputs"]), inputs["paddings"], context)[0], tf.float32
            )
        }

    return function


def assert_as_buffers(
    layer: MixtureOfExperts, inputs: dict, dtype: str = "float32", tolerance: float = TOLERANCE
) -> np.ndarray:
    """Asserts that blocks compute what buffers do, and zeros for paddings; returns it, `[B, T, M]`."""
    logical_axes = {"outputs": "btm"}
    blocks, buffers = (
        harness.run(call(layer, platform, dtype), inputs, logical_axes=logical_axes)["outputs"]
        for platform in ("cpu", "")
    )
    np.testing.assert_allclose(blocks, buffers, rtol=0, atol=tolerance * max(np.abs(buffers).max(), 1e-9))
    np.testing.assert_array_equal(blocks[inputs["paddings"]], 0.0)
    return blocks


@pytest.mark.parametrize("choices", CHOICES)
@pytest.mark.parametrize("padded", PADDED)
def test_equals_buffers(choices, padded):
    """With any routing and any paddings."""
    layer = layer_of(num_experts=4, num_groups=2)
    outputs = assert_as_buffers(layer, inputs_of(layer, 4, 6, choices, padded))
    assert np.any(outputs) == (padded != "all")


@pytest.mark.parametrize(
    "num_experts, num_groups, batch, length",
    [
        (2, 1, 1, 1),  # fewer tokens than a block has rows
        (2, 1, 3, 43),  # many to an expert, and no whole number of blocks
        (64, 1, 4, 4),  # more experts than choices, and too many for a loop each
        (3, 8, 8, 8),  # groups of few
    ],
)
def test_equals_buffers_for_any_number_of_tokens_experts_and_groups(num_experts, num_groups, batch, length):
    layer = layer_of(num_experts, num_groups)
    assert_as_buffers(layer, inputs_of(layer, batch, length))


@pytest.mark.parametrize("num_experts, length, biases", [(FEW_EXPERTS, 6, True), (2, 43, True), (4, 6, False)])
def test_prepared_experts_compute_the_same(num_experts, length, biases):
    """Of many, whose tree is sorted by name in a loop, `expert_10` before `expert_2`; of two, in many blocks."""
    layer = layer_of(num_experts=num_experts, num_groups=1, biases=biases)
    inputs, stacked = inputs_of(layer, 4, length), call(layer, "cpu")

    def unstacked(inputs: dict) -> dict:
        repeated = {name: weight if name == "gate" else weight[None] for name, weight in inputs["theta"].items()}
        theta = layer.prepare_decoding(repeated, Context(platform="cpu"))
        of_experts = {name: weights for name, weights in theta.items() if name != "gate"}
        one = tree.map_leaves(lambda leaf: leaf[0], of_experts)
        return stacked({**inputs, "theta": tree.unflatten(tree.flatten({**one, "gate": theta["gate"]}))})

    found, expected = (
        harness.run(function, inputs, logical_axes={"outputs": "btm"})["outputs"] for function in (unstacked, stacked)
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


@pytest.mark.parametrize("router", ["switch", "top_k:k=3"])
def test_equals_buffers_for_any_number_of_choices(router):
    """With one expert per token and with three."""
    layer = layer_of(num_experts=4, num_groups=2, router=router, biases=False)
    assert np.any(assert_as_buffers(layer, inputs_of(layer, 4, 6)))


def test_equals_buffers_in_bfloat16():
    layer = layer_of(num_experts=4, num_groups=1)
    assert_as_buffers(layer, inputs_of(layer, 4, 6), "bfloat16", BFLOAT16_TOLERANCE)


def test_only_inference_on_one_processor_with_room_for_all_is_block_sparse():
    """A loop of unknown length has no gradient and cannot be sharded."""
    layer = layer_of(num_experts=4, num_groups=4)
    others = [dataclasses.replace(layer, inference_capacity_factor=2.0), dataclasses.replace(layer, dispatch="einsum")]

    def loops(layer: MixtureOfExperts, platform: str, layout: Layout = Layout()) -> bool:
        executable = harness.compile_for(
            call(layer, platform, layout=layout), inputs_of(layer, 4, 6), layout, {"outputs": "btm"}
        )
        return " while(" in executable.hlo()

    assert loops(layer, "cpu")
    assert not loops(layer, "tpu") and not loops(layer, "cpu", Layout(DeviceMesh((4,))))
    assert not any(loops(other, "cpu") for other in others)


def test_a_block_has_rows_of_one_expert_and_used_blocks_come_first():
    """Expert 2 has 9 tokens: two blocks of 8; expert 0 three: one block; the others none."""
    experts = np.array([2] * 9 + [0] * 3)
    routing = Routing(
        experts=tf.constant(experts.reshape(1, 6, 2), tf.int32),
        positions=tf.zeros((1, 6, 2), tf.int32),
        weights=tf.ones((1, 6, 2)),
        metrics={},
    )
    blocks = BlockSparse(routing, num_experts=4)
    tokens = np.arange(1, 7, dtype=np.float32).reshape(1, 6, 1)
    expected = np.zeros((blocks.number, blocks.size), np.float32)
    expected[0, :3], expected[1], expected[2, 0] = [5, 6, 6], [1, 1, 2, 2, 3, 3, 4, 4], 5
    assert blocks.size == 8
    np.testing.assert_array_equal(blocks.dispatch(tf.constant(tokens)).numpy().reshape(expected.shape), expected)


@pytest.mark.parametrize(
    "num_choices, num_experts, size", [(2, 8, 8), (64, 8, 8), (1024, 8, 64), (384, 8, 16), (9000, 8, 64)]
)
def test_block_size_is_about_half_of_an_experts_rows(num_choices, num_experts, size):
    assert block_size(num_choices, num_experts) == size


@pytest.mark.parametrize("num_choices, num_experts, size", [(2, 8, 16), (64, 8, 16), (384, 16, 16), (512, 16, 32)])
def test_block_size_of_prepared_experts_is_about_that_of_an_experts_rows(num_choices, num_experts, size):
    assert block_size(num_choices, num_experts, prepared=True) == size
    assert block_size(9000, num_experts, prepared=True) == 32
