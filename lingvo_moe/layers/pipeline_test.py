"""A pipeline computes what its layers compute one microbatch after another, whatever the schedule and the devices."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from lingvo_moe.layers.base import Context, matrix
from lingvo_moe.layers.pipeline import pipeline
from lingvo_moe.layers.schedule import Schedule
from lingvo_moe.lazy import tf
from lingvo_moe.sharding.layout import Layout
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
    """The body applied to one microbatch after another, without `pipeline`."""

    def function(inputs: dict) -> dict:
        outputs, sizes = [], []
        for m in range(microbatches):
            constants = {name: tensor[m::microbatches] for name, tensor in inputs["constants"].items()}
            state, context = inputs["inputs"][m::microbatches], Context(seed=inputs["seed"]).fold(m)
            for i in range(repeats):
                theta = {"wo": inputs["theta"]["wo"][i], "first": {"wi": inputs["theta"]["first"]["wi"][i]}}
                state, metrics = body(theta, state, constants, context.fold(i))
                sizes.append(metrics["size"])
            outputs.append(state)
        joined = tf.reshape(tf.stack(outputs, axis=1), inputs["inputs"].shape)
        return {"outputs": joined, "metrics": {"size": tf.add_n(sizes) / len(sizes), "one": tf.constant(1.0)}}

    return harness.run(harness.with_gradients(function), given)


@functools.cache
def expected(repeats: int = REPEATS, microbatches: int = 4, batch: int = BATCH) -> dict:
    return plain_loop(repeats, microbatches, inputs_of(repeats, batch))


def assert_equal(found: dict, wanted: dict):
    for path, value in wanted.items():
        np.testing.assert_allclose(found[path], value, rtol=0, atol=TOLERANCE * np.abs(value).max(), err_msg=path)


@pytest.mark.parametrize("remat", ["full", "keep_outputs", "keep_hidden"])
@pytest.mark.parametrize("name, stages", [("none", 1), ("gpipe", 2), ("gpipe", 3), ("circular", 2)])
def test_equals_microbatches_one_after_another(name, stages, remat):
    """Outputs, metrics, and gradients of inputs, weights and constants, with dropout; bubbles of NaN change nothing."""
    wanted = expected()
    assert all(np.isfinite(value).all() and np.abs(value).max() > 0 for value in wanted.values())
    assert_equal(harness.run(piped(Schedule.of(name, stages, 4, REPEATS), remat=remat), inputs_of()), wanted)


if __name__ == "__main__":
    pass
