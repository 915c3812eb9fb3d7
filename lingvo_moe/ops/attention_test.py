"""Attention's products that are made for a CPU equal the plain einsums, in value and gradient."""

from __future__ import annotations

import numpy as np
import pytest

from lingvo_moe import tree
from lingvo_moe.lazy import tf
from lingvo_moe.ops.attention import CACHED_AXES, attention_logits, attention_mean
from lingvo_moe.ops.context import Context
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
