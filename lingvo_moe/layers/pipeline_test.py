"""A pipeline computes what its layers compute one microbatch after another, whatever the schedule and the devices."""

from __future__ import annotations

import collections
import dataclasses
import functools
import re

import numpy as np
import pytest
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from lingvo_moe.errors import UserError
from lingvo_moe.layers.base import Context, matrix
from lingvo_moe.layers.pipeline import pipeline
from lingvo_moe.layers.pipeline_schedule import Schedule
from lingvo_moe.layers.summaries import SummaryCollector
from lingvo_moe.lazy import tf
from lingvo_moe.program import Program
from lingvo_moe.sharding.layout import DeviceMesh, Layout
from lingvo_moe.testing import harness

pytestmark = pytest.mark.slow

BATCH, LENGTH, MODEL, HIDDEN, REPEATS = 8, 2, 4, 8, 4
# Relative to the largest element: up to 8 layers of products over M = 4 and H = 8, their gradients summed over up to 16
# microbatches, in another order.
TOLERANCE = 64 * harness.FLOAT32_ROUNDING
CONSTANT_AXES = {"memory": "BLM", "mask": "BT"}
LOGICAL_AXES = {"theta/wo": "RHM", "theta/first/wi": "RMH", "inputs": "BTM", "constants/memory": "BLM"}
LOGICAL_AXES |= {f"gradients/{path}": axes for path, axes in LOGICAL_AXES.items()} | {"values/outputs": "BTM"}


def weights_of(repeats: int) -> dict:
    sizes = {"M": MODEL, "H": HIDDEN}
    return {
        "wo": matrix("HM", fan_in="H", **sizes).repeated(repeats),
        "first": {"wi": matrix("MH", fan_in="M", **sizes).repeated(repeats)},
    }


@functools.cache
def inputs_of(repeats: int = REPEATS, batch: int = BATCH) -> dict:
    random = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return random.normal(size=shape).astype(np.float32) / 2

    return {
        "theta": {"wo": normal(repeats, HIDDEN, MODEL), "first": {"wi": normal(repeats, MODEL, HIDDEN)}},
        "inputs": normal(batch, LENGTH, MODEL) + 1.0,
        "constants": {"memory": normal(batch, 3, MODEL), "mask": random.random((batch, LENGTH)) < 0.7},
        "seed": np.int32([5, 6]),
    }


def body(theta: dict, inputs: tf.Tensor, constants: dict, context: Context) -> tuple[tf.Tensor, dict]:
    """A residual layer that reads constants, drops out, and returns a differentiable and a constant metric.

    Of zeros, which are in the first bubbles, its outputs and its metric are NaN.
    """
    with_nan = inputs / tf.reduce_max(tf.abs(inputs))
    hidden = context.checkpoint_name(tf.einsum("BTM,MH->BTH", with_nan, theta["first"]["wi"]), "hidden", "BTH")
    hidden = context.dropout(tf.tanh(hidden), 0.25, "hidden", "BTH")
    read = tf.reduce_mean(constants["memory"], axis=1)[:, None]
    largest = context.checkpoint_name(tf.argmax(hidden, axis=-1, output_type=tf.int32), "output", "BT")
    outputs = context.checkpoint_name(tf.einsum("BTH,HM->BTM", hidden, theta["wo"]), "output", "BTM")
    outputs = tf.sin(outputs * read) * (1.0 + 0.01 * tf.cast(largest, tf.float32))[..., None]
    outputs = inputs + tf.where(constants["mask"][..., None], outputs, 0.0)
    context.summarize("layer", lambda: {"size": tf.reduce_mean(outputs), "max": tf.reduce_max(outputs)})
    return outputs, {"size": tf.reduce_mean(hidden**2), "one": tf.constant(1.0)}


def piped(schedule: Schedule, layout: Layout = Layout(), remat: str = "full", metrics=("size", "one")):
    def function(inputs: dict) -> dict:
        outputs, found = pipeline(
            body,
            weights_of(schedule.repeats),
            inputs["theta"],
            inputs["inputs"],
            inputs["constants"],
            CONSTANT_AXES,
            Context(layout, inputs["seed"]),
            schedule,
            metric_names=metrics,
            remat=remat,
        )
        return {"outputs": outputs, "metrics": found}

    return harness.with_gradients(function)


def plain_loop(repeats: int, microbatches: int, given: dict) -> dict:
    """The body applied to one microbatch after another, without `pipeline`, eagerly: nothing is compiled."""

    def function(inputs: dict) -> dict:
        outputs, sizes = [], []
        for m in range(microbatches):
            constants = {name: tensor[m::microbatches] for name, tensor in inputs["constants"].items()}
            state, context = inputs["inputs"][m::microbatches], Context(seed=inputs["seed"])
            context = context.fold(m) if microbatches > 1 else context
            for i in range(repeats):
                theta = {"wo": inputs["theta"]["wo"][i], "first": {"wi": inputs["theta"]["first"]["wi"][i]}}
                state, metrics = body(theta, state, constants, context.fold(i))
                sizes.append(metrics["size"])
            outputs.append(state)
        joined = tf.reshape(tf.stack(outputs, axis=1), inputs["inputs"].shape)
        return {"outputs": joined, "metrics": {"size": tf.add_n(sizes) / len(sizes), "one": tf.constant(1.0)}}

    return harness.arrays(harness.with_gradients(function)(tf.nest.map_structure(tf.constant, given)))


@functools.cache
def expected(repeats: int = REPEATS, microbatches: int = 4, batch: int = BATCH) -> dict:
    return plain_loop(repeats, microbatches, inputs_of(repeats, batch))


def assert_equal(found: dict, wanted: dict):
    for path, value in wanted.items():
        np.testing.assert_allclose(found[path], value, rtol=0, atol=TOLERANCE * np.abs(value).max(), err_msg=path)


def test_equals_microbatches_one_after_another_without_a_pipeline():
    """Outputs, metrics, and gradients of inputs, weights and constants, with dropout."""
    wanted = expected()
    assert all(np.isfinite(value).all() and np.abs(value).max() > 0 for value in wanted.values())
    assert_equal(harness.run(piped(Schedule.of("none", 1, 4, REPEATS)), inputs_of()), wanted)


@dataclasses.dataclass(frozen=True)
class Size:
    """The size of a pipeline, whose stages do not divide its layers."""

    stages: int
    microbatches: int
    repeats: int
    rows: int  # of a microbatch

    @property
    def of_inputs(self) -> tuple[int, int]:
        """The arguments of `inputs_of`."""
        return self.repeats, self.microbatches * self.rows


# Fewer microbatches than stages; then more of both, one row in a microbatch, and, by GPipe, a stage without a layer.
# Each stage stores two layers, so that a loop runs over them.
SMALL, LARGE = Size(3, 2, 4, 2), Size(4, 5, 5, 1)


@functools.cache  # the tests of results and of the graph's size read the same programs
def lowered(name: str, size: Size) -> Program:
    schedule = Schedule.of(name, size.stages, size.microbatches, size.repeats)
    return harness.lower_for(piped(schedule), inputs_of(*size.of_inputs))


@pytest.mark.parametrize("name", ["gpipe", "circular"])
@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
def test_equals_for_other_numbers_of_stages_layers_and_rows(name, size):
    """As without a pipeline; bubbles of NaN change nothing."""
    found = harness.engine(Layout()).compile(lowered(name, size))(inputs_of(*size.of_inputs))
    assert_equal(harness.arrays(found), expected(size.repeats, size.microbatches, size.microbatches * size.rows))


@pytest.mark.parametrize(
    "name, stages, remat, mesh, layout",
    [
        ("gpipe", 3, "keep_outputs", "3", "pipeline"),
        ("gpipe", 4, "keep_hidden", "4x2", "pipeline_gshard"),
        ("circular", 2, "full", "2x2x2", "pipeline_gspmd"),
    ],
)
def test_partitioned_stages_pass_microbatches_by_collective_permute(name, stages, remat, mesh, layout):
    """Activations and memory, forward and backward; nothing is gathered, and results are those without a pipeline.

    What a policy saves stays at its stage. The circular schedule assigns stored layers round-robin, by an AllToAll
    outside of the loops. Three stages do not divide four layers, whose weights are stored everywhere, so that their
    gradients are gathered. On three axes, dimensions within a stage are sharded and gathered as well.
    """
    sharded, is_uneven = Layout.of(DeviceMesh.parse(mesh), layout), REPEATS % stages
    axes = {path: letters.replace("R", "r") if is_uneven else letters for path, letters in LOGICAL_AXES.items()}
    function = piped(Schedule.of(name, stages, 4, REPEATS), sharded, remat)
    executable = harness.compile_for(function, inputs_of(), sharded, axes)
    assert_equal(harness.arrays(executable(inputs_of())), expected())
    assert rotations(executable.hlo()) == 4
    if len(sharded.mesh.shape) < 3 and not is_uneven:
        assert "all-gather" not in harness.collectives(executable)


def rotations(hlo: str) -> int:
    """Counts the CollectivePermutes of a while loop's body."""
    return len(
        re.findall(r" collective-permute(?:-start)?\(.*op_name=\"[^\"]*/while(?:_1)?/\w+_iterations/concat", hlo)
    )


@pytest.mark.parametrize("name", ["gpipe", "circular"])
def test_graph_does_not_grow_with_stages_or_microbatches(name):
    """Compile time is that of one stage: the operations are as many; only numbers grow.

    Constants are not counted, nor their broadcasts: where two of the numbers are equal, they are one constant.
    """
    few, many = (operations(lowered(name, size)) for size in (SMALL, LARGE))
    assert few["stablehlo.dot_general"] and few == many


def operations(program: Program) -> collections.Counter[str]:
    """Counts the operations of a lowered program by name."""
    with ir.Context() as context:
        stablehlo.register_dialect(context)
        module = stablehlo.deserialize_portable_artifact(context, program.module)
        return collections.Counter(re.findall(r"\bstablehlo\.(?!constant|broadcast)\w+", str(module)))


def test_summaries_are_means_over_microbatches_and_have_a_row_per_repeat():
    """Of those called `max`, the largest; the same as without a pipeline."""

    def collected(schedule: Schedule) -> dict[str, np.ndarray]:
        def function(inputs: dict) -> dict:
            context = Context(seed=inputs["seed"], add_summary=(collector := SummaryCollector())).named("stack")
            arguments = (inputs["theta"], inputs["inputs"], inputs["constants"], CONSTANT_AXES)
            pipeline(body, weights_of(schedule.repeats), *arguments, context, schedule)
            return collector.values

        return harness.run(function, inputs_of())

    plain, found = (collected(Schedule.of(*arguments, 4, REPEATS)) for arguments in (("none", 1), ("circular", 3)))
    assert set(plain) == {"stack/layer/size", "stack/layer/max"} == set(found)
    for name, values in plain.items():
        assert values.shape == (REPEATS,) and len(set(values)) > 2
        np.testing.assert_allclose(found[name], values, rtol=TOLERANCE)


def test_gradients_of_bfloat16_constants_are_summed_in_float32():
    """As in `repeat`: a bfloat16 sum of 1 and 2^-8 a time stays 1, since each addition is rounded away."""
    repeats = 129  # the last one adds 1, every other one 2^-8
    schedule = Schedule.of("gpipe", 1, 1, repeats)

    def read(theta: dict, inputs: tf.Tensor, constants: dict, context: Context) -> tuple[tf.Tensor, dict]:
        return inputs + constants["memory"] * theta["scale"], {}

    def function(inputs: dict) -> dict:
        weights = {"scale": matrix("MH", fan_in="M", M=1, H=1).repeated(repeats)}
        context = Context(dtype="bfloat16")
        theta, memory = {"scale": context.cast(inputs["scale"])}, {"memory": context.cast(inputs["memory"])}
        start = tf.zeros((1, 1, 1), tf.bfloat16)
        outputs, _ = pipeline(read, weights, theta, start, memory, {"memory": "BLM"}, context, schedule)
        return {"outputs": tf.cast(outputs, tf.float32)}

    scale = np.full((repeats, 1, 1), 2.0**-8, np.float32)
    scale[-1] = 1
    found = harness.run(harness.with_gradients(function), {"memory": np.ones((1, 1, 1), np.float32), "scale": scale})
    assert found["gradients/memory"].item() == 1.5


def test_microbatches_that_do_not_divide_the_batch_are_an_error():
    """A batch has no rows to spare."""
    with pytest.raises(UserError, match="model.microbatches is 3, which does not divide a batch of 8 rows"):
        piped(Schedule.of("gpipe", 2, 3, REPEATS))(tf.nest.map_structure(tf.constant, inputs_of()))
