"""The Conformer learns by CTC, and refuses settings of layers that it does not have."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lingvo_moe import tree
from lingvo_moe.errors import UserError
from lingvo_moe.layers.base import Context, initial_value
from lingvo_moe.lazy import tf
from lingvo_moe.models.speech import SpeechRecognition
from lingvo_moe.optimizers.adafactor import Adafactor
from lingvo_moe.optimizers.schedules import InverseSquareRoot

BATCH, BINS, LABELS, FRAMES_OF_LABEL, CLASSES = 16, 8, 3, 8, 4
FIELDS = {
    "target_vocabulary": 8,
    "num_layers": 1,
    "model_dim": 16,
    "hidden_dim": 32,
    "num_heads": 2,
    "head_dim": 8,
    "num_bins": BINS,
    "subsampling_channels": 8,
    "kernel_size": 3,
    "unroll": True,
}
OPTIMIZER = Adafactor(learning_rate=InverseSquareRoot(peak_value=0.05, decay_after=25))


def recordings(step: int) -> dict:
    """Labels 1 to 4, of which each sounds in two bins of its own for eight frames, two positions."""
    random = np.random.default_rng(step)
    labels = random.integers(1, CLASSES + 1, (BATCH, LABELS)).astype(np.int32)
    sounds = np.repeat(np.repeat(np.eye(CLASSES)[labels - 1], 2, axis=-1), FRAMES_OF_LABEL, axis=1)
    features = 2.0 * sounds + random.normal(size=sounds.shape)
    source = {"features": features.astype(np.float32), "segment_ids": np.ones(features.shape[:2], np.int32)}
    return {"source": source, "target": {"labels": labels, "segment_ids": np.ones_like(labels)}}


@pytest.mark.slow
def test_twenty_steps_teach_hearing():
    """Below ln 4, what knowing the positions of the labels but no sound would give: it hears the recordings."""
    model = SpeechRecognition(**FIELDS)
    weights, is_finite = model.weights(), tf.constant(True)

    @tf.function(autograph=False)  # not compiled, which would take longer than all steps
    def train(theta: dict, optimizer_state: dict, step: tf.Tensor, batch: dict) -> tuple[dict, dict, tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(theta)
            loss, metrics = model.loss(theta, batch, Context(seed=tf.stack([3, step])))
        gradients = tf.nest.map_structure(tf.convert_to_tensor, tape.gradient(loss, theta))
        updated = OPTIMIZER.update(weights, theta, gradients, optimizer_state, step, is_finite, Context())
        return *updated, metrics["cross_entropy"]

    flat, seed, losses = tree.flatten(weights), tf.constant([0, 1]), []
    theta = tree.unflatten({path: initial_value(weight, path, seed) for path, weight in flat.items()})
    optimizer_state = tree.map_leaves(lambda entry: tf.zeros(entry.shape), OPTIMIZER.state(weights))
    for step in range(20):
        batch = tree.map_leaves(tf.constant, recordings(step))
        theta, optimizer_state, loss = train(theta, optimizer_state, tf.constant(step), batch)
        losses.append(float(loss))
    assert losses[0] > math.log(CLASSES) + 0.2 and np.mean(losses[-5:]) < math.log(CLASSES) - 0.2, losses


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"twin_keys": True}, "model.twin_keys is true, but a speech model has no cross-attention"),
        (
            {"num_experts": 8},
            "model.num_experts is 8, but no layer of the pattern dense:activation=swish has experts; .*=dense,moe",
        ),
    ],
)
def test_settings_of_layers_that_it_has_not_are_errors(fields, message):
    """They would do nothing."""
    with pytest.raises(UserError, match=message):
        SpeechRecognition(**FIELDS, **fields)


def test_its_routing_is_not_that_of_tokens():
    """A source of recordings is an error, not a field that is missing."""
    model = SpeechRecognition(**FIELDS, num_experts=4, layer_pattern=("moe",))
    with pytest.raises(UserError, match="SpeechRecognition has no tokens in its source, whose experts could be shown"):
        model.routing({}, recordings(0), Context())
