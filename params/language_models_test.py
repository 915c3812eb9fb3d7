"""The language models have the papers' settings, and the small ones learn, on their mesh as on one device."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from lingvo_moe import experiment, registry, tree
from lingvo_moe.layers.mixture_of_experts import MixtureOfExperts
from lingvo_moe.models.language_model import LanguageModel
from lingvo_moe.sharding.layout import LAYOUTS, DeviceMesh, Layout
from lingvo_moe.testing import harness

pytestmark = pytest.mark.slow

NAMES = [name for name in registry.names() if name.split(".")[0] in ("dense_lm", "sparse_lm", "hybrid_lm")]
SMALL = {"dense_lm.Small": "4x2", "sparse_lm.Small": "8", "hybrid_lm.Small": "4x2"}
ACTIVATIONS = ("BTM", "BTND", "BTH", "BTV", "GSM", "GSEC", "GECM", "EGCM", "EGCH")
# Smaller still for tests of training; the structure is the same.
_TINY = [
    "model.model_dim=32",
    "model.hidden_dim=64",
    "model.num_heads=2",
    "model.head_dim=16",
    "model.target_vocabulary=64",
    "input.target_length=16",
    "optimizer.learning_rate.warmup_steps=5",
]
_STEPS, _COMPARED = 60, 5
# As in translation_test: rounding of sums in another order, amplified by a few steps of Adafactor.
_TRAINED_TOLERANCE = 1e-5


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(SMALL)))
def test_settings_are_those_of_gspmd(name):
    """Section 5.1: sequences of 1024 tokens, 16-bit activations; section 5.4: each sequence is a group."""
    config = experiment.get(name)
    assert isinstance(config.model, LanguageModel)
    assert (config.input.source_length, config.input.target_length, config.model.target_vocabulary) == (0, 1024, 32_000)
    assert (config.model.activation_dtype, config.model.num_groups) == ("bfloat16", config.input.batch_size)


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(SMALL)))
def test_prompts_can_be_continued(name):
    """Devices divide the prompts, and an expert has room for all hypotheses of at least two, which choose alike."""
    config = experiment.get(name)
    rows, length = config.decoding_specs()["ids"].shape
    assert (rows, length) == (config.input.batch_size, 1024 - config.search.max_length)
    for layer in config.model.feed_forwards("decoder"):
        if isinstance(layer, MixtureOfExperts):
            hypotheses = rows * config.search.beam_size // layer.inference_num_groups
            capacity = layer._inference_capacity(hypotheses)
            assert 2 * config.search.beam_size <= capacity <= hypotheses


@pytest.mark.parametrize("name", NAMES)
def test_every_layout_assigns_a_mesh_axis_once_per_tensor(name):
    """In each layout that the mesh allows; `mesh_axes` raises for a collision."""
    config = experiment.get(name)
    tensors = {weight.logical_axes for weight in tree.flatten(config.model.weights()).values()}.union(ACTIVATIONS)
    fitting = [key for key in LAYOUTS.names() if LAYOUTS.get(key).num_mesh_axes == len(config.mesh.shape)]
    assert len(fitting) >= (2 if len(config.mesh.shape) < 3 else 1)
    for layout in fitting:
        for logical_axes in tensors:
            assigned = [axis for axis in Layout.of(config.mesh, layout).mesh_axes(logical_axes) if axis]
            assert len(assigned) == len(set(assigned)), f"{logical_axes} in {layout}"


def counting(config: experiment.Experiment, step: int) -> dict:
    """Returns sequences that count upwards from a random number, which a model soon predicts."""
    shape = (config.input.batch_size, config.input.target_length)
    starts = np.random.default_rng(step).integers(0, 40, (shape[0], 1))
    labels = (4 + (starts + np.arange(shape[1])) % 40).astype(np.int32)
    ids = np.concatenate([np.full((shape[0], 1), 2, np.int32), labels[:, :-1]], axis=1)
    return {
        "target": {
            "ids": ids,
            "labels": labels,
            "segment_ids": np.ones(shape, np.int32),
            "positions": np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1)),
        }
    }


def train(config: experiment.Experiment, steps: int) -> list[dict[str, float]]:
    """Returns the metrics of the first steps, on virtual devices."""
    engine = harness.engine(Layout.of(config.mesh))
    init, step = engine.compile(config.steps.init()), engine.compile(config.steps.train(config.batch_specs()))
    state, history = init({"seed": np.array([0, 7], np.int32)})["state"], []
    for number in range(steps):
        outputs = step({"state": state, "batch": counting(config, number)})
        state = outputs["state"]
        history.append({name: float(value) for name, value in outputs["metrics"].items()})
    return history


@functools.cache
def on_one_device(name: str) -> list[dict[str, float]]:
    """Returns the metrics of all steps."""
    return train(experiment.get(name, _TINY, DeviceMesh((1,))), _STEPS)


@pytest.mark.parametrize("name", SMALL)
def test_small_model_learns(name):
    """The loss starts at the logarithm of the vocabulary, and counting has one continuation."""
    losses = [metrics["cross_entropy"] for metrics in on_one_device(name)]
    assert losses[0] > 3.5 and np.mean(losses[-5:]) < losses[0] / 2, losses


@pytest.mark.parametrize("name", SMALL)
def test_small_model_trains_alike_on_its_mesh_and_on_one_device(name):
    """With dropout, random routing and dropped tokens; each loss is of updated weights, so these are compared, too."""
    config = experiment.get(name, _TINY)
    assert str(config.mesh) == SMALL[name]
    for step, (one, many) in enumerate(zip(on_one_device(name), train(config, _COMPARED)), start=1):
        for metric, value in one.items():
            np.testing.assert_allclose(many[metric], value, rtol=_TRAINED_TOLERANCE, err_msg=f"{metric} of step {step}")
