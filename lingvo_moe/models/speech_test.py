"""The Conformer: its loss does not depend on padding, a pipeline's schedule or the mesh."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

from lingvo_moe import tree
from lingvo_moe.errors import UserError
from lingvo_moe.layers.base import Context, initial_value
from lingvo_moe.lazy import tf
from lingvo_moe.models.speech import SpeechRecognition
from lingvo_moe.sharding.layout import DeviceMesh, Layout
from lingvo_moe.testing import harness

pytestmark = pytest.mark.slow

BATCH, FRAMES, BINS, LABELS = 16, 24, 8, 3
MODEL = SpeechRecognition(
    target_vocabulary=8,
    num_layers=8,
    model_dim=8,
    hidden_dim=16,
    num_heads=2,
    head_dim=4,
    num_bins=BINS,
    subsampling_channels=8,  # enough that ReLU leaves something of every frame
    kernel_size=3,
    input_dropout=0.1,
    residual_dropout=0.1,
    attention_dropout=0.1,
    remat="full",
    microbatches=8,
)
# Relative to the largest element of a tensor: as in pipelines_test, through twice as many sublayers.
TOLERANCE = 1024 * harness.FLOAT32_ROUNDING


@functools.cache
def batch() -> dict:
    """Recordings of different lengths, among them an empty row."""
    random = np.random.default_rng(0)
    frames, labels = np.full(BATCH, FRAMES), np.full(BATCH, LABELS)
    frames[::2], labels[::2], frames[3], labels[3] = 20, 2, 0, 0
    source = {
        "features": random.normal(size=(BATCH, FRAMES, BINS)).astype(np.float32),
        "segment_ids": (np.arange(FRAMES) < frames[:, None]).astype(np.int32),
    }
    target = {
        "labels": random.integers(1, 5, (BATCH, LABELS)).astype(np.int32),
        "segment_ids": (np.arange(LABELS) < labels[:, None]).astype(np.int32),
    }
    return {"source": source, "target": target}


@functools.cache
def theta() -> dict:
    flat = tree.flatten(MODEL.weights())
    return tree.unflatten(
        {path: initial_value(weight, path, tf.constant([0, 1])).numpy() for path, weight in flat.items()}
    )


def with_gradients(model: SpeechRecognition, layout: Layout = Layout()):
    """The model's loss, metrics and gradients in training."""

    def function(inputs: dict) -> dict:
        leaves = tree.flatten(inputs["theta"])
        with tf.GradientTape() as tape:
            tape.watch(list(leaves.values()))
            loss, metrics = model.loss(inputs["theta"], inputs["batch"], Context(layout, seed=inputs["seed"]))
        gradients = map(tf.convert_to_tensor, tape.gradient(loss, list(leaves.values())))
        return {"loss": loss, "metrics": metrics, "gradients": tree.unflatten(dict(zip(leaves, gradients)))}

    return function


def test_the_epsilon_is_that_of_the_layers():
    """With a huge one, normalised activations and with them all logits are zeros: every class is as probable."""
    model, source = dataclasses.replace(MODEL, norm_epsilon=1e30), batch()["source"]
    outputs = model.transcribe(tree.map_leaves(tf.constant, theta()), tree.map_leaves(tf.constant, source), Context())
    np.testing.assert_array_equal(outputs, np.zeros_like(outputs))
    usual = MODEL.transcribe(tree.map_leaves(tf.constant, theta()), tree.map_leaves(tf.constant, source), Context())
    assert np.any(usual)


def run(layout: Layout = Layout(), **changes) -> dict[str, np.ndarray]:
    model = dataclasses.replace(MODEL, **changes)
    weights = {path: weight.logical_axes for path, weight in tree.flatten(model.weights()).items()}
    axes = {f"{of}/{path}": letters for of in ("theta", "gradients") for path, letters in weights.items()}
    axes |= {"batch/source/features": "BSm", "batch/source/segment_ids": "BS"}
    axes |= {"batch/target/labels": "BT", "batch/target/segment_ids": "BT"}
    inputs = {"theta": theta(), "batch": batch(), "seed": np.int32([3, 4])}
    return harness.run(with_gradients(model, layout), inputs, layout, axes)


@functools.cache
def one_after_another() -> dict[str, np.ndarray]:
    """The microbatches one after another, on one device."""
    return run()


@pytest.mark.parametrize(
    "pipeline, stages, mesh, layout",
    [
        ("circular", 4, "4", "pipeline_data"),
        ("gpipe", 2, "2x2x2", "pipeline_gspmd"),
    ],
)
def test_pipelined_equals_microbatches_one_after_another(pipeline, stages, mesh, layout):
    """Loss, metrics and all gradients, on 4 and 8 devices; the mesh of 8 shards the layers of a stage, too."""
    found = run(Layout.of(DeviceMesh.parse(mesh), layout), pipeline=pipeline, stages=stages)
    for path, value in one_after_another().items():
        np.testing.assert_allclose(found[path], value, rtol=0, atol=TOLERANCE * np.abs(value).max(), err_msg=path)


def test_every_weight_has_a_gradient():
    assert all(np.any(value) for path, value in one_after_another().items() if path.startswith("gradients/"))


def evaluate(given: dict) -> dict[str, float]:
    """Loss and metrics of one microbatch, computed eagerly."""
    model = dataclasses.replace(MODEL, num_layers=2, microbatches=1, remat="none", unroll=True)
    weights = tree.map_leaves(tf.constant, theta())
    stacked = tree.map_leaves(lambda weight: weight[:2], weights["encoder"]["layer_0"])
    weights["encoder"] = {"layer_0": stacked, "norm": weights["encoder"]["norm"]}
    loss, metrics = model.loss(weights, tree.map_leaves(tf.constant, given), Context())
    return {"loss": float(loss), **{name: float(value) for name, value in metrics.items()}}


def test_padding_does_not_change_the_loss():
    """More of it, with anything in it."""
    padded = tree.map_leaves(np.copy, batch())
    source, target = padded["source"], padded["target"]
    source["features"][source["segment_ids"] == 0] = 9.0
    target["labels"][target["segment_ids"] == 0] = 4
    source["features"] = np.pad(source["features"], [(0, 0), (0, 8), (0, 0)], constant_values=3.0)
    source["segment_ids"] = np.pad(source["segment_ids"], [(0, 0), (0, 8)])
    one, other = evaluate(batch()), evaluate(padded)
    assert one["tokens"] == other["tokens"] == batch()["target"]["segment_ids"].sum()
    np.testing.assert_allclose(one["loss"], other["loss"], rtol=64 * harness.FLOAT32_ROUNDING)


def test_transcribes_blanks_where_there_is_no_frame():
    """A softmax that always prefers class 3 gives it at each position of a recording, and blanks after the last one."""
    weights = tree.map_leaves(tf.constant, theta())
    model = dataclasses.replace(MODEL, num_layers=1, microbatches=1, remat="none", unroll=True)
    first = tree.map_leaves(lambda weight: weight[:1], weights["encoder"]["layer_0"])
    # The last norm has no scale and a bias of ones, so the logits are the sums of the projection's columns.
    norm = {"scale": tf.zeros(8), "bias": tf.ones(8)}
    weights["encoder"] = {"layer_0": first, "norm": norm}
    weights["softmax"] = {"projection": tf.one_hot([3] * 8, 8)}
    found = model.transcribe(weights, tree.map_leaves(tf.constant, batch()["source"]), Context()).numpy()
    present = batch()["source"]["segment_ids"][:, ::4] != 0
    np.testing.assert_array_equal(found, np.where(present, 3, 0))


def test_kernel_of_no_position_is_an_error_when_the_model_is_made():
    with pytest.raises(UserError, match="kernel_size is 0"):
        dataclasses.replace(MODEL, kernel_size=0)


@pytest.mark.parametrize(
    "name, value", [("post_norm", True), ("norm", "rms"), ("position_offset", 2), ("wavelengths", "paper")]
)
def test_settings_of_a_transformer_that_a_conformer_lacks_are_errors(name, value):
    with pytest.raises(UserError, match=f"model.{name} is {str(value).lower()}, but a "):
        dataclasses.replace(MODEL, **{name: value})


@pytest.mark.parametrize("name, value", [("sampled_softmax", 2), ("label_smoothing", 0.1), ("tied_embeddings", True)])
def test_settings_of_a_softmax_over_words_are_errors(name, value):
    with pytest.raises(UserError, match=f"model.{name} is {value}; a speech model, whose loss is CTC, has none"):
        dataclasses.replace(MODEL, **{name: value})
