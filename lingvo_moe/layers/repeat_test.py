"""Unrolled, scanned and rematerialised stacks compute the same numbers; the scanned graphs do not grow with depth."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

from lingvo_moe import tree
from lingvo_moe.layers.base import Context, matrix
from lingvo_moe.layers.checkpoint_policy import REMAT
from lingvo_moe.layers.repeat import repeat
from lingvo_moe.layers.summaries import SummaryCollector
from lingvo_moe.lazy import tf
from lingvo_moe.program import Program
from lingvo_moe.sharding.layout import DeviceMesh, Layout
from lingvo_moe.testing import harness

pytestmark = pytest.mark.slow

BATCH, LENGTH, MODEL, HIDDEN = 8, 4, 4, 8
MANY = 32  # repeats, where the graph or the memory of few would not show the difference
WAYS = {"unroll": {"unroll": True}, "scan": {}, **{remat: {"remat": remat} for remat in REMAT if remat != "none"}}
# Relative to the largest element: R = 3 layers of products over M = 4 and H = 8, summed in another order.
TOLERANCE = 16 * harness.FLOAT32_ROUNDING


def weights_of(times: int) -> dict:
    """Two nested weights, so that order by path matters."""
    sizes = {"M": MODEL, "H": HIDDEN}
    return {
        "wo": matrix("HM", fan_in="H", **sizes).repeated(times),
        "first": {"wi": matrix("MH", fan_in="M", **sizes).repeated(times)},
    }


def inputs_of(times: int) -> dict:
    random = np.random.default_rng(0)
    return {
        "theta": {
            "wo": random.normal(size=(times, HIDDEN, MODEL)).astype(np.float32) / 3,
            "first": {"wi": random.normal(size=(times, MODEL, HIDDEN)).astype(np.float32) / 2},
        },
        "inputs": random.normal(size=(BATCH, LENGTH, MODEL)).astype(np.float32),
        "memory": random.normal(size=(BATCH, 5, MODEL)).astype(np.float32),
        "seed": np.int32([5, 6]),
    }


def body(theta: dict, inputs: tf.Tensor, constants: dict, context: Context) -> tuple[tf.Tensor, dict]:
    """A residual layer that reads a constant, drops out, and returns a differentiable and a constant metric."""
    hidden = tf.tanh(context.checkpoint_name(tf.einsum("BTM,MH->BTH", inputs, theta["first"]["wi"]), "hidden", "BTH"))
    hidden = context.dropout(hidden, 0.25, "hidden", "BTH")
    read = tf.reduce_mean(constants["memory"], axis=1)[:, None]
    largest = context.checkpoint_name(tf.argmax(hidden, axis=-1, output_type=tf.int32), "output", "BT")
    outputs = context.checkpoint_name(tf.einsum("BTH,HM->BTM", hidden, theta["wo"]), "output", "BTM")
    outputs = tf.sin(outputs * read) * (1.0 + 0.01 * tf.cast(largest, tf.float32))[..., None]
    return inputs + outputs, {"size": tf.reduce_mean(hidden**2), "one": tf.constant(1.0)}


def call(times: int, way: dict, layout: Layout = Layout(), metric_names: tuple[str, ...] = ("size", "one")):
    def function(inputs: dict) -> dict:
        constants, context = {"memory": inputs["memory"]}, Context(layout, inputs["seed"])
        outputs, metrics = repeat(
            body,
            weights_of(times),
            inputs["theta"],
            inputs["inputs"],
            constants,
            context,
            metric_names=metric_names,
            **way,
        )
        return {"outputs": outputs, "metrics": metrics}

    return harness.with_gradients(function)


@functools.cache  # for results, the graph's size and memory
def lowered(way: str, times: int) -> Program:
    return harness.lower_for(call(times, WAYS[way]), inputs_of(times))


@functools.cache
def compiled(way: str, times: int):
    return harness.engine(Layout()).compile(lowered(way, times))


def assert_equal(found: dict, expected: dict):
    for path, value in expected.items():
        np.testing.assert_allclose(found[path], value, rtol=0, atol=TOLERANCE * np.abs(value).max(), err_msg=path)


@pytest.fixture(scope="module")
def plain_loop() -> dict:
    """The body applied three times in a plain loop, without `repeat`."""

    def function(inputs: dict) -> dict:
        context, outputs, sizes = Context(seed=inputs["seed"]), inputs["inputs"], []
        for i in range(3):
            theta = {"wo": inputs["theta"]["wo"][i], "first": {"wi": inputs["theta"]["first"]["wi"][i]}}
            outputs, metrics = body(theta, outputs, {"memory": inputs["memory"]}, context.fold(i))
            sizes.append(metrics["size"])
        return {"outputs": outputs, "metrics": {"size": tf.add_n(sizes) / 3, "one": tf.constant(1.0)}}

    return harness.run(harness.with_gradients(function), inputs_of(3))


@pytest.mark.parametrize("way", WAYS)
def test_equals_a_plain_loop(way, plain_loop):
    """Outputs, metrics, and gradients of inputs, of every weight and of the constants, under dropout."""
    found = harness.arrays(compiled(way, 3)(inputs_of(3)))
    assert np.abs(plain_loop["gradients/memory"]).max() > 0
    assert_equal(found, plain_loop)


@pytest.mark.parametrize(
    "way, mesh",
    [("unroll", "8"), ("scan", "4x2"), ("full", "8"), ("full", "4x2"), ("keep_hidden", "8"), ("keep_outputs", "4x2")],
)
def test_partitioned_equals_unpartitioned(way, mesh, plain_loop):
    layout = Layout.of(DeviceMesh.parse(mesh))
    logical_axes = {"theta/wo": "RHM", "theta/first/wi": "RMH", "inputs": "BTM", "memory": "BTM"}
    logical_axes |= {f"gradients/{path}": name for path, name in logical_axes.items()} | {"values/outputs": "BTM"}
    assert_equal(harness.run(call(3, WAYS[way], layout), inputs_of(3), layout, logical_axes), plain_loop)


@pytest.mark.parametrize("way", WAYS)
def test_without_metrics(way, plain_loop):
    found = harness.run(call(3, WAYS[way], metric_names=()), inputs_of(3))
    np.testing.assert_allclose(found["values/outputs"], plain_loop["values/outputs"], rtol=0, atol=TOLERANCE)
    assert not any("metrics" in path for path in found)


@pytest.mark.parametrize("way", ["scan", "full", "keep_hidden"])
def test_graph_size_does_not_grow_with_depth(way):
    """Only numbers grow: a shape's digits, a trip count."""
    few, many = (len(lowered(way, times).module) for times in (3, MANY))
    assert abs(many - few) < 0.02 * few


def test_graph_size_grows_when_unrolled():
    few, many = (len(lowered("unroll", times).module) for times in (3, 9))
    assert many > 2 * few


def test_rematerialisation_saves_inputs_alone():
    """The plain scan keeps every intermediate tensor of each layer; rematerialisation one `[B, T, M]` per layer."""
    assert temporaries("full") < temporaries("scan") / 2


def test_each_checkpoint_policy_saves_more_than_the_one_before():
    """Per layer an output `[B, T, M]` and a choice `[B, T]`, then a hidden `[B, T, H]`, by the compiler."""
    of_outputs, of_hidden = BATCH * LENGTH * (MODEL + 1) * 4, BATCH * LENGTH * HIDDEN * 4
    full, outputs, hidden = (temporaries(way) / MANY for way in ("full", "keep_outputs", "keep_hidden"))
    assert outputs - full == pytest.approx(of_outputs, rel=0.1)
    assert hidden - outputs == pytest.approx(of_hidden, rel=0.1)


def test_gradients_are_stored_in_the_dtype_they_were_computed_in():
    """Bit for bit what float32 sums of bfloat16 gradients are, in half the memory."""
    inputs = inputs_of(3)
    narrow, wide = (
        harness.compile_for(in_bfloat16(weights), inputs) for weights in (weights_of(3), wide_weights_of(3))
    )
    found, expected = harness.arrays(narrow(inputs)), harness.arrays(wide(inputs))
    for path in ("gradients/theta/wo", "gradients/theta/first/wi"):
        assert found[path].dtype == np.float32 and found[path].any()
        np.testing.assert_array_equal(found[path], expected[path], err_msg=path)
    stack = f"bf16[3,{HIDDEN},{MODEL}]"
    assert stack in narrow.hlo() and stack not in wide.hlo()


@pytest.mark.parametrize("remat", ["full", "keep_hidden"])
def test_gradients_of_bfloat16_constants_are_summed_in_float32(remat):
    """A decoder adds up the gradients of the encoder's outputs over its layers.

    A bfloat16 sum of 1 and 2^-8 a time stays 1: each addition is rounded away.
    """
    repeats = 129  # the first gradient is 1, each later one 2^-8

    def read(theta: dict, inputs: tf.Tensor, constants: dict, context: Context) -> tuple[tf.Tensor, dict]:
        return inputs + constants["memory"] * theta["scale"][:, None], {}

    def function(inputs: dict) -> dict:
        weights = {"scale": matrix("MH", fan_in="M", M=1, H=1).repeated(repeats)}
        context = Context(dtype="bfloat16")
        theta, memory = {"scale": context.cast(inputs["scale"])}, {"memory": context.cast(inputs["memory"])}
        outputs, _ = repeat(read, weights, theta, tf.zeros((1, 1, 1), tf.bfloat16), memory, context, remat=remat)
        return {"outputs": tf.cast(outputs, tf.float32)}

    scale = np.full((repeats, 1, 1), 2.0**-8, np.float32)
    scale[-1] = 1  # the backward loop begins with the last repeat
    found = harness.run(harness.with_gradients(function), {"memory": np.ones((1, 1, 1), np.float32), "scale": scale})
    assert found["gradients/memory"].item() == 1.5


def wide_weights_of(times: int) -> dict:
    return tree.map_leaves(lambda weight: dataclasses.replace(weight, keep_float32=True), weights_of(times))


def in_bfloat16(weights: dict):
    """`repeat` with full rematerialisation of a layer that casts its weights, as layers do."""

    def cast(theta: dict, inputs: tf.Tensor, constants: dict, context: Context) -> tuple[tf.Tensor, dict]:
        hidden = tf.tanh(tf.einsum("BTM,MH->BTH", inputs, context.cast(theta["first"]["wi"])))
        return inputs + tf.einsum("BTH,HM->BTM", hidden, context.cast(theta["wo"])), {}

    def function(inputs: dict) -> dict:
        context = Context(dtype="bfloat16")
        outputs, _ = repeat(cast, weights, inputs["theta"], context.cast(inputs["inputs"]), {}, context, remat="full")
        return {"outputs": tf.cast(outputs, tf.float32)}

    return harness.with_gradients(function)


def test_saved_tensors_are_not_recomputed():
    """Both products of the layer are saved: the compiled backward loop has two multiplications less."""
    counts = {way: compiled(way, MANY).hlo().count(" dot(") for way in ("full", "keep_hidden")}
    assert counts["keep_hidden"] == counts["full"] - 2


def temporaries(way: str) -> int:
    """Bytes of temporary memory for MANY repeats, by the compiler."""
    return compiled(way, MANY).memory().temp_size_in_bytes


def test_unroll_with_remat_is_an_error():
    with pytest.raises(ValueError, match="unroll and remat exclude each other"):
        repeat(body, weights_of(1), {}, tf.zeros((1, 1, MODEL)), {}, Context(), unroll=True, remat="full")


@pytest.mark.parametrize("way", WAYS)
def test_summaries_have_one_row_per_repeat(way, plain_loop):
    """By the scope's name, without a gradient; the results are the same as without summaries."""

    def summarizing(theta: dict, inputs: tf.Tensor, constants: dict, context: Context) -> tuple[tf.Tensor, dict]:
        outputs, metrics = body(theta, inputs, constants, context)
        context.summarize("sublayer", lambda: {"sum": tf.reduce_sum(outputs), "size": metrics["size"]})
        return outputs, metrics

    def function(inputs: dict, add_summary: SummaryCollector) -> dict:
        context = Context(seed=inputs["seed"], add_summary=add_summary).named("stack")
        constants = {"memory": inputs["memory"]}
        outputs, metrics = repeat(
            summarizing,
            weights_of(3),
            inputs["theta"],
            inputs["inputs"],
            constants,
            context,
            metric_names=("size", "one"),
            **WAYS[way],
        )
        return {"outputs": outputs, "metrics": metrics}

    def collected(inputs: dict) -> dict:
        collector = SummaryCollector()
        found = harness.with_gradients(lambda tensors: function(tensors, collector))(inputs)
        return found | {"summaries": collector.values}

    found = harness.run(collected, inputs_of(3))
    assert_equal(found, plain_loop)
    rows = {path.removeprefix("summaries/"): values for path, values in found.items() if path.startswith("summaries/")}
    assert rows.keys() == {"stack/sublayer/sum", "stack/sublayer/size"} and all(
        values.shape == (3,) for values in rows.values()
    )
    np.testing.assert_allclose(rows["stack/sublayer/size"].mean(), found["values/metrics/size"], rtol=TOLERANCE)
    np.testing.assert_allclose(rows["stack/sublayer/sum"][-1], found["values/outputs"].sum(), rtol=1e-4)
