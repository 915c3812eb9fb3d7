"""What both kinds of models share: here, how their tokens reach experts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from lingvo_moe import tree
from lingvo_moe.errors import UserError
from lingvo_moe.layers.base import Context, initial_value
from lingvo_moe.lazy import tf
from lingvo_moe.models.translation import Translation
from lingvo_moe.testing import harness

VOCABULARY, BATCH, LENGTH = 16, 8, 8
MODEL = Translation(
    source_vocabulary=VOCABULARY,
    target_vocabulary=VOCABULARY,
    num_layers=4,
    model_dim=16,
    hidden_dim=32,
    num_heads=2,
    head_dim=8,
    num_experts=8,
    num_groups=8,
    residual_dropout=0.1,
    label_smoothing=0.1,
    unroll=True,
)
# A loss of about 3 nats, and its gradients, through some 50 float32 products and sums in a row, ordered differently.
TOLERANCE = 64 * harness.FLOAT32_ROUNDING


def inputs_of(model: Translation) -> dict:
    """Initial weights, and a batch of random sentences of different lengths."""
    weights = tree.flatten(model.weights())
    theta = {path: initial_value(weight, path, tf.constant([0, 1])).numpy() for path, weight in weights.items()}
    random = np.random.default_rng(0)
    segments = (np.arange(LENGTH) < random.integers(LENGTH // 2, LENGTH + 1, (BATCH, 1))).astype(np.int32)
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (BATCH, 1))

    def words() -> np.ndarray:
        return segments * random.integers(4, VOCABULARY, (BATCH, LENGTH)).astype(np.int32)

    side = {"segment_ids": segments, "positions": positions}
    batch = {"source": side | {"ids": words()}, "target": side | {"ids": words(), "labels": words()}}
    return {"theta": tree.unflatten(theta), "batch": batch, "seed": np.int32([3, 4])}


def training_loss(model: Translation):
    """Loss, metrics and gradients, with dropout and random routing."""

    def function(inputs: dict) -> dict:
        loss, metrics = model.loss(inputs["theta"], inputs["batch"], Context(seed=inputs["seed"]))
        return {"loss": loss, "metrics": metrics}

    return harness.with_gradients(function)


def test_a_translation_model_trains_equally_with_either_dispatch():
    """Same loss and gradient of every weight, in both stacks."""
    inputs = tree.map_leaves(tf.constant, inputs_of(MODEL))
    einsum, gather = (
        harness.arrays(training_loss(dataclasses.replace(MODEL, dispatch=dispatch))(inputs))
        for dispatch in ("einsum", "gather")
    )
    assert einsum["values/metrics/overflow"] > 0 and einsum["values/metrics/second_expert"] > 0
    for path, expected in einsum.items():
        np.testing.assert_allclose(
            gather[path], expected, rtol=0, atol=TOLERANCE * np.abs(expected).max(), err_msg=path
        )


def test_dispatch_is_each_layers():
    with_experts = dataclasses.replace(MODEL, dispatch="gather").feed_forwards("decoder")[1]
    assert with_experts.dispatch == "gather"


@pytest.mark.parametrize("num_experts", [0, 8])
def test_an_unknown_dispatch_is_an_error_that_names_it(num_experts):
    with pytest.raises(UserError, match="dispatch is 'gater'; use one of auto, einsum, gather. Did you mean gather?"):
        dataclasses.replace(MODEL, num_experts=num_experts, dispatch="gater")
