"""Gradients of weights in a pipeline: reduced once for all microbatches, and the same as without."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest

from lingvo_moe.engines import pjrt
from lingvo_moe.layers.base import Context, matrix
from lingvo_moe.layers.feed_forward import DenseFeedForward
from lingvo_moe.layers.mixture_of_experts import MixtureOfExperts
from lingvo_moe.layers.pipeline import pipeline
from lingvo_moe.layers.pipeline_schedule import Schedule
from lingvo_moe.layers.weight_gradients import RowParts
from lingvo_moe.lazy import tf
from lingvo_moe.sharding.layout import DeviceMesh, Layout
from lingvo_moe.testing import harness

BATCH, LENGTH, MODEL, HIDDEN, REPEATS, MICROBATCHES = 16, 2, 4, 8, 2, 4
# Relative to the largest element: two layers of products over M = 4 and H = 8, their gradients summed over 32
# positions, in another order.
TOLERANCE = 32 * harness.FLOAT32_ROUNDING
CONSTANT_AXES = {"memory": "BLM", "mask": "BT"}
LOGICAL_AXES = {"theta/wo": "RHM", "theta/wi": "RMH", "inputs": "BTM", "constants/memory": "BLM"}
LOGICAL_AXES |= {f"gradients/{path}": axes for path, axes in LOGICAL_AXES.items()} | {"values/outputs": "BTM"}
WEIGHTS = {
    "wi": matrix("MH", fan_in="M", M=MODEL, H=HIDDEN).repeated(REPEATS),
    "wo": matrix("HM", fan_in="H", M=MODEL, H=HIDDEN).repeated(REPEATS),
}


@functools.cache
def inputs() -> dict:
    random = np.random.default_rng(0)

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (scale * random.normal(size=shape)).astype(np.float32)

    # Weights scaled by their fan-in keep the outputs near 1: `body` takes the sine of their product with `memory`,
    # and its gradients would multiply the rounding of an argument of 6 by outputs of 7.
    return {
        "theta": {
            "wi": normal(REPEATS, MODEL, HIDDEN, scale=MODEL**-0.5),
            "wo": normal(REPEATS, HIDDEN, MODEL, scale=HIDDEN**-0.5),
        },
        "inputs": normal(BATCH, LENGTH, MODEL),
        "constants": {"memory": normal(BATCH, 3, MODEL), "mask": random.random((BATCH, LENGTH)) < 0.7},
        "seed": np.int32([5, 6]),
    }


def body(theta: dict, inputs: tf.Tensor, constants: dict, context: Context) -> tuple[tf.Tensor, dict]:
    """A residual layer with dropout that reads constants, each row by itself."""
    hidden = context.checkpoint_name(tf.einsum("BTM,MH->BTH", inputs, theta["wi"]), "hidden", "BTH")
    hidden = context.dropout(tf.tanh(hidden), 0.25, "hidden", "BTH")
    outputs = context.checkpoint_name(tf.einsum("BTH,HM->BTM", hidden, theta["wo"]), "output", "BTM")
    read = tf.reduce_mean(constants["memory"], axis=1)[:, None]
    return inputs + tf.where(constants["mask"][..., None], tf.sin(outputs * read), 0.0), {}


@functools.cache
def expected() -> dict:
    """The body applied to one microbatch after another, all rows at once, eagerly: nothing is compiled."""

    def function(given: dict) -> dict:
        outputs = []
        for m in range(MICROBATCHES):
            constants = {name: tensor[m::MICROBATCHES] for name, tensor in given["constants"].items()}
            state, context = given["inputs"][m::MICROBATCHES], Context(seed=given["seed"]).fold(m)
            for i in range(REPEATS):
                theta = {name: weight[i] for name, weight in given["theta"].items()}
                state, _ = body(theta, state, constants, context.fold(i))
            outputs.append(state)
        return {"outputs": tf.reshape(tf.stack(outputs, axis=1), given["inputs"].shape)}

    return harness.arrays(harness.with_gradients(function)(tf.nest.map_structure(tf.constant, inputs())))


def compiled(name: str, stages: int, mesh: str, layout: str, remat: str, independent_rows: bool) -> pjrt.Executable:
    sharded = Layout.of(DeviceMesh.parse(mesh), layout)

    def function(given: dict) -> dict:
        outputs, _ = pipeline(
            body,
            WEIGHTS,
            given["theta"],
            given["inputs"],
            given["constants"],
            CONSTANT_AXES,
            Context(sharded, given["seed"]),
            Schedule.of(name, stages, MICROBATCHES, REPEATS),
            remat=remat,
            independent_rows=independent_rows,
        )
        return {"outputs": outputs}

    return harness.compile_for(harness.with_gradients(function), inputs(), sharded, LOGICAL_AXES)


def assert_equal(executable: pjrt.Executable):
    found = harness.arrays(executable(inputs()))
    for path, value in expected().items():
        np.testing.assert_allclose(found[path], value, rtol=0, atol=TOLERANCE * np.abs(value).max(), err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, stages, mesh, layout, remat",
    [("none", 1, "4", "gshard", "full"), ("gpipe", 2, "2x2", "pipeline_gshard", "keep_hidden")],
)
def test_gradients_of_independent_rows_are_reduced_once_for_all_microbatches(name, stages, mesh, layout, remat):
    """Partial values: the loop carries each device's terms, with its rows' dropout; the AllReduce comes after it."""
    executable = compiled(name, stages, mesh, layout, remat, independent_rows=True)
    assert_equal(executable)
    assert reductions_in_loops(executable) == 0 and harness.collectives(executable)["all-reduce"] > 0
    # Without the declaration, the loop reduces the gradients in each iteration.
    assert reductions_in_loops(compiled(name, stages, mesh, layout, remat, independent_rows=False)) > 0


@pytest.mark.slow
def test_gradients_are_those_of_all_rows_where_layers_are_sharded_too():
    """Dimensions within a layer stay sharded, by a circular schedule, whose stages are in different rounds."""
    assert_equal(compiled("circular", 2, "2x2x2", "pipeline_gspmd", "full", independent_rows=True))


def reductions_in_loops(executable: pjrt.Executable) -> int:
    """Counts the AllReduces of loops' bodies."""
    return len(re.findall(r" all-reduce(?:-start)?\(.*op_name=\"[^\"]*while", executable.hlo()))


@pytest.mark.parametrize(
    "layout, rows, weight, count",
    [
        ("BGE:x", 8, matrix("MH", fan_in="M", M=4, H=4), 4),
        ("BGE:x", 6, matrix("MH", fan_in="M", M=4, H=4), None),  # unequal parts
        ("GE:x", 8, matrix("MH", fan_in="M", M=4, H=4), None),  # every device has all rows
        ("BGE:x", 8, matrix("EMH", fan_in="M", E=4, M=4, H=4), None),  # experts on the same devices
        ("BGE:x,H~x", 8, matrix("MH", fan_in="M", M=4, H=4), None),  # the update is sharded among them
    ],
)
def test_parts_are_those_of_the_devices_that_divide_the_rows_alone(layout, rows, weight, count):
    """A device cannot sum terms of a weight that it does not have."""
    parts = RowParts.of(Layout.of(DeviceMesh((4,)), layout), rows, {"w": weight.repeated(2)})
    assert (parts and (parts.count, parts.rows, parts.mesh_axis)) == (count and (count, rows, "x"))


def test_experts_compute_rows_together():
    """Rows share the experts' capacity: differentiated separately, they would have other dropped tokens."""
    assert DenseFeedForward(model_dim=4, hidden_dim=8).independent_rows
    assert not MixtureOfExperts(model_dim=4, hidden_dim=8, num_experts=2, num_groups=2).independent_rows
