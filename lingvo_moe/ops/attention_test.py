"""Attention equals the plain formulas, in value and gradient, on each platform; unwritten parts are not read."""

from __future__ import annotations

import re

import numpy as np
import pytest

from lingvo_moe import tree
from lingvo_moe.engines.cluster import Cluster
from lingvo_moe.lazy import tf
from lingvo_moe.ops.attention import CACHED_AXES, attend_to_written, attention_logits, attention_mean
from lingvo_moe.ops.context import Context
from lingvo_moe.sharding.layout import DeviceMesh, Layout
from lingvo_moe.testing import harness

SIZES = {"B": 2, "N": 3, "D": 4, "L": 5}
# Sums over D = 4 or L = 5 in another order.
TOLERANCE = 8 * harness.FLOAT32_ROUNDING


def inputs_of(num_queries: int, axes: tuple[str, str]) -> dict:
    random = np.random.default_rng(0)
    shapes = {"queries": (2, num_queries, 3, 4), "logits": (2, 3, num_queries, 5)}
    shapes |= {name: tuple(SIZES[axis] for axis in own) for name, own in zip(("keys", "values"), axes)}
    return {name: tf.constant(random.normal(size=shape), tf.float32) for name, shape in shapes.items()}


def mask_of(num_queries: int) -> np.ndarray:
    """`[B, T, L]`; the first query of the second sentence sees no key."""
    mask = np.random.default_rng(1).random((2, num_queries, 5)) < 0.7
    mask[1, 0] = False
    return mask


def drop(probabilities: tf.Tensor) -> tf.Tensor:
    """Dropout that is the same in each call."""
    kept = np.random.default_rng(2).random(probabilities.shape) < 0.6
    return tf.where(kept, probabilities / tf.cast(0.6, probabilities.dtype), tf.zeros((), probabilities.dtype))


def mean_of(inputs: dict, axes: str, context: Context) -> tf.Tensor:
    mask = tf.constant(mask_of(inputs["logits"].shape[2]))
    return attention_mean(inputs["logits"], mask, inputs["values"], axes, drop, context)


def plain_mean(inputs: dict, axes: str) -> tf.Tensor:
    """The formula, whose gradient is TensorFlow's."""
    mask = tf.constant(mask_of(inputs["logits"].shape[2]))[:, None]
    probabilities = tf.nn.softmax(tf.where(mask, inputs["logits"], -1e9))
    return tf.einsum(f"BNTL,{axes}->BTND", drop(probabilities), inputs["values"])


@pytest.mark.parametrize("num_queries", [1, 2])
@pytest.mark.parametrize("axes", [CACHED_AXES, ("BLND", "BLND")])
@pytest.mark.parametrize("platform", ["", "cpu", "gpu", "tpu"])
def test_equals_the_formula_in_float64(num_queries, axes, platform):
    """In value and gradient; one query over a cache has a form of its own on a CPU. A query may see no key."""
    inputs = inputs_of(num_queries, axes)
    narrow = harness.with_gradients(
        lambda given, context=Context(platform=platform): {
            "logits": attention_logits(given["queries"], given["keys"], axes[0], context),
            "mean": mean_of(given, axes[1], context),
        }
    )
    wide = harness.with_gradients(
        lambda given: {
            "logits": tf.einsum(f"BTND,{axes[0]}->BNTL", given["queries"], given["keys"]),
            "mean": plain_mean(given, axes[1]),
        }
    )
    found = harness.arrays(narrow(inputs))
    expected = harness.arrays(wide(tree.map_leaves(lambda tensor: tf.cast(tensor, tf.float64), inputs)))
    assert np.abs(expected["gradients/logits"]).max() > 0.1
    for path, value in expected.items():
        atol = TOLERANCE * np.abs(value).max()
        np.testing.assert_allclose(found[path], value, rtol=0, atol=atol, err_msg=path)


def test_bfloat16_products_of_one_query_are_summed_in_float32():
    """Logits are float32, which they become in any case; the mean has the dtype of activations."""
    inputs = tree.map_leaves(lambda tensor: tf.cast(tensor, tf.bfloat16), inputs_of(1, CACHED_AXES))
    context = Context(dtype="bfloat16", platform="cpu")
    assert attention_logits(inputs["queries"], inputs["keys"], CACHED_AXES[0], context).dtype == tf.float32
    assert mean_of(inputs, CACHED_AXES[1], context).dtype == tf.bfloat16


def compiled_mean(dtype: str):
    """The mean of 256 values and its gradients, compiled for one H100."""
    random = np.random.default_rng(0)
    shapes = {"logits": (2, 4, 256, 256), "values": (2, 256, 4, 64)}
    inputs = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    context = Context(dtype=dtype, seed=tf.constant([0, 1]), platform="gpu")

    def mean(given: dict) -> dict:
        logits, values = (tf.cast(given[name], dtype) for name in ("logits", "values"))
        return {"mean": attention_mean(logits, tf.ones((2, 256, 256), tf.bool), values, "BLND", lambda p: p, context)}

    return Cluster.of("h100:1x1").compile(harness.lower_for(harness.with_gradients(mean), inputs))


def test_bfloat16_probabilities_are_not_kept_in_float32():
    """On a GPU the logits' size bounds the step: float32 is in registers alone. With float32 activations it is not."""
    wide = re.compile(r"%\S+ = f32\[2,4,256,256\]\S* (?:fusion|custom-call|convert)\(")
    entry = {dtype: compiled_mean(dtype).hlo().split("ENTRY ")[1] for dtype in ("bfloat16", "float32")}
    assert len(wide.findall(entry["bfloat16"])) == 1  # the gradient of the float32 logits that the test is given
    assert len(wide.findall(entry["float32"])) > 1


@pytest.mark.parametrize("written, read", [(1, 3), (3, 3), (4, 6), (6, 6), (7, 13), (13, 13)])
def test_the_smallest_part_that_holds_the_written_positions_is_read(written, read):
    """A part that is too small would leave out what a hypothesis has said; the sizes of branches are checked in XLA."""

    @tf.function(jit_compile=True)
    def positions(written: tf.Tensor) -> tf.Tensor:
        return attend_to_written(tf.constant, written, 13, Context(platform="cpu"))

    assert int(positions(tf.constant(written))) == read


@pytest.mark.parametrize(
    "context", [Context(), Context(platform="tpu"), Context(platform="cpu", layout=Layout(DeviceMesh((2,))))]
)
def test_other_platforms_and_several_devices_read_the_whole_cache(context):
    """A branch would cost a TPU more than it saves, and would have to be taken by all devices at the same time."""
    assert int(attend_to_written(tf.constant, tf.constant(1), 13, context)) == 13


def test_a_cache_of_few_positions_has_no_empty_part():
    """Attention over no position at all has no mean."""
    assert int(attend_to_written(tf.constant, tf.constant(1), 2, Context(platform="cpu"))) == 1
    assert int(attend_to_written(tf.constant, tf.constant(1), 1, Context(platform="cpu"))) == 1
