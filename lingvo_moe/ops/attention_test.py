"""Attention for a CPU: products equal the plain einsums, in value and gradient; unwritten parts are not read."""

from __future__ import annotations

import numpy as np
import pytest

from lingvo_moe import tree
from lingvo_moe.lazy import tf
from lingvo_moe.ops.attention import CACHED_AXES, attention_logits, attention_mean, over_written
from lingvo_moe.ops.context import Context
from lingvo_moe.sharding.layout import DeviceMesh, Layout
from lingvo_moe.testing import harness

SIZES = {"B": 2, "N": 3, "D": 4, "L": 5}
# Sums over D = 4 or L = 5 in another order.
TOLERANCE = 8 * harness.FLOAT32_ROUNDING


def inputs_of(num_queries: int, axes: tuple[str, str]) -> dict:
    random = np.random.default_rng(0)
    shapes = {"queries": (2, num_queries, 3, 4), "probabilities": (2, 3, num_queries, 5)}
    shapes |= {name: tuple(SIZES[axis] for axis in own) for name, own in zip(("keys", "values"), axes)}
    return {name: tf.constant(random.normal(size=shape), tf.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize("num_queries", [1, 2])
@pytest.mark.parametrize("axes", [CACHED_AXES, ("BLND", "BLND")])
def test_products_for_a_cpu_equal_the_einsums(num_queries, axes):
    """Of one query over a cache, which has a form of its own, and of others, which do not."""

    def function(inputs: dict, context: Context) -> dict:
        return {
            "logits": attention_logits(inputs["queries"], inputs["keys"], axes[0], context),
            "mean": attention_mean(inputs["probabilities"], inputs["values"], axes[1], context),
        }

    plain, for_cpu = (
        harness.arrays(
            harness.with_gradients(lambda inputs, context=Context(platform=platform): function(inputs, context))(
                inputs_of(num_queries, axes)
            )
        )
        for platform in ("", "cpu")
    )
    assert plain["values/logits"].shape == (2, 3, num_queries, 5) and plain["values/mean"].shape == (
        2,
        num_queries,
        3,
        4,
    )
    for path, value in plain.items():
        atol = TOLERANCE * np.abs(value).max()
        np.testing.assert_allclose(for_cpu[path], value, rtol=0, atol=atol, err_msg=path)


def test_bfloat16_products_of_one_query_are_summed_in_float32():
    """Logits are float32, which they become in any case; the mean has the dtype of activations."""
    inputs = tree.map_leaves(lambda tensor: tf.cast(tensor, tf.bfloat16), inputs_of(1, CACHED_AXES))
    context = Context(dtype="bfloat16", platform="cpu")
    assert attention_logits(inputs["queries"], inputs["keys"], CACHED_AXES[0], context).dtype == tf.float32
    assert attention_mean(inputs["probabilities"], inputs["values"], CACHED_AXES[1], context).dtype == tf.bfloat16


@pytest.mark.parametrize("written, read", [(1, 3), (3, 3), (4, 6), (6, 6), (7, 13), (13, 13)])
def test_the_smallest_part_that_holds_the_written_positions_is_read(written, read):
    """A part that is too small would leave out what a hypothesis has said; the sizes of branches are checked in XLA."""

    @tf.function(jit_compile=True)
    def positions(written: tf.Tensor) -> tf.Tensor:
        return over_written(tf.constant, written, 13, Context(platform="cpu"))

    assert int(positions(tf.constant(written))) == read


@pytest.mark.parametrize(
    "context", [Context(), Context(platform="tpu"), Context(platform="cpu", layout=Layout(DeviceMesh((2,))))]
)
def test_other_platforms_and_several_devices_read_the_whole_cache(context):
    """A branch would cost a TPU more than it saves, and would have to be taken by all devices at the same time."""
    assert int(over_written(tf.constant, tf.constant(1), 13, context)) == 13


def test_a_cache_of_few_positions_has_no_empty_part():
    """Attention over no position at all has no mean."""
    assert int(over_written(tf.constant, tf.constant(1), 2, Context(platform="cpu"))) == 1
    assert int(over_written(tf.constant, tf.constant(1), 1, Context(platform="cpu"))) == 1
