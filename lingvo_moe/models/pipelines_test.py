"""Pipelined models, with experts and dropout, have the loss and gradients of microbatches one after another."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

from lingvo_moe import tree
from lingvo_moe.analysis.collectives import find_collectives
from lingvo_moe.analysis.hlo import Module
from lingvo_moe.engines.pjrt import Executable
from lingvo_moe.errors import UserError
from lingvo_moe.layers.base import Context, initial_value
from lingvo_moe.lazy import tf
from lingvo_moe.models.language_model import LanguageModel
from lingvo_moe.models.transformer import Transformer
from lingvo_moe.models.translation import Translation
from lingvo_moe.sharding.layout import DeviceMesh, Layout
from lingvo_moe.testing import harness
from lingvo_moe.testing.plans import stride

pytestmark = pytest.mark.slow

BATCH, LENGTH = 16, 8
_SIZES = {
    "target_vocabulary": 16,
    "num_layers": 4,
    "model_dim": 8,
    "hidden_dim": 16,
    "num_heads": 2,
    "head_dim": 4,
    "num_experts": 4,
    "num_groups": 16,
    "input_dropout": 0.1,
    "residual_dropout": 0.1,
    "attention_dropout": 0.1,
    "remat": "full",
    "microbatches": 4,
    "biases": True,
}
MODELS: dict[str, Transformer] = {
    "language_model": LanguageModel(layer_pattern=("moe",), **_SIZES),
    # With stacks of different depths: the encoder's stages have two layers each, the decoder's one.
    "translation": Translation(
        source_vocabulary=16,
        layer_pattern=("dense",),
        encoder_layer_pattern=("moe",),
        **_SIZES | {"num_layers": 6, "num_encoder_layers": 4},
    ),
}
# Relative to the largest element of a tensor: some 50 float32 products and sums in a row; the smallest gradients are
# differences of much larger terms.
TOLERANCE = 512 * harness.FLOAT32_ROUNDING


@functools.cache
def inputs_of(name: str) -> dict:
    """A batch with rows that end early and one without tokens, and initial weights."""
    random = np.random.default_rng(0)

    def side() -> dict:
        segments = np.ones((BATCH, LENGTH), np.int32)
        segments[::2, 6:], segments[3] = 0, 0
        ids = random.integers(4, 16, (2, BATCH, LENGTH)).astype(np.int32)
        positions = np.tile(np.arange(LENGTH, dtype=np.int32), (BATCH, 1))
        return {"ids": ids[0], "labels": ids[1], "segment_ids": segments, "positions": positions}

    model = MODELS[name]
    theta = {
        path: initial_value(weight, path, tf.constant([0, 1])).numpy()
        for path, weight in tree.flatten(model.weights()).items()
    }
    theta = {
        path: value + random.normal(size=value.shape).astype(np.float32) * path.endswith("_bias")
        for path, value in theta.items()
    }
    return {"theta": tree.unflatten(theta), "batch": {s: side() for s in model.sides}, "seed": np.int32([3, 4])}


@functools.lru_cache(maxsize=2)  # in the order of the tests below, none is compiled twice; each takes 0.2 GB
def compiled(name: str, layout: Layout = Layout(), **changes) -> Executable:
    """The model's loss, metrics and gradients in training."""
    model = dataclasses.replace(MODELS[name], **changes)

    def function(inputs: dict) -> dict:
        leaves = tree.flatten(inputs["theta"])
        with tf.GradientTape() as tape:
            tape.watch(list(leaves.values()))
            loss, metrics = model.loss(inputs["theta"], inputs["batch"], Context(layout, seed=inputs["seed"]))
        gradients = map(tf.convert_to_tensor, tape.gradient(loss, list(leaves.values())))
        return {"loss": loss, "metrics": metrics, "gradients": tree.unflatten(dict(zip(leaves, gradients)))}

    weights = {path: weight.logical_axes for path, weight in tree.flatten(model.weights()).items()}
    axes = {f"{of}/{path}": letters for of in ("theta", "gradients") for path, letters in weights.items()}
    axes |= dict.fromkeys(tree.flatten({"batch": inputs_of(name)["batch"]}), "BT")
    return harness.compile_for(function, inputs_of(name), layout, axes)


@functools.cache
def one_after_another(name: str) -> dict:
    return harness.arrays(compiled(name)(inputs_of(name)))


def test_stages_gather_no_more_than_the_model_without_a_pipeline():
    """On three axes: nothing is gathered between stages, and AllToAlls are those of the experts, on their axis."""

    def in_the_loop(mesh: str, layout: str, **changes) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        sharded = Layout.of(DeviceMesh.parse(mesh), layout)
        module = Module(compiled("language_model", sharded, **changes).hlo(), sharded.mesh.size)
        found = [collective for collective in find_collectives(module) if "_iterations/" in collective.op_name]
        gathers, all_to_alls = (
            [(collective.bytes, stride(collective)) for collective in found if collective.kind == kind]
            for kind in ("all-gather", "all-to-all")
        )
        return gathers, all_to_alls

    # On 2x2x2 the numbers of devices of neighbouring stages are 4 apart, those of neighbouring experts 2.
    gathers, all_to_alls = in_the_loop("2x2x2", "pipeline_gspmd", pipeline="gpipe", stages=2)
    plain_gathers, plain_all_to_alls = in_the_loop("2x2", "gspmd")
    assert gathers and all(spacing < 4 for _, spacing in gathers)
    assert sum(size for size, _ in gathers) <= sum(size for size, _ in plain_gathers)
    assert len(all_to_alls) == 6 and {spacing for _, spacing in all_to_alls} == {2}
    assert all_to_alls == plain_all_to_alls


@pytest.mark.parametrize(
    "name, pipeline, mesh, layout",
    [
        ("language_model", "gpipe", "2x2x2", "pipeline_gspmd"),
        ("translation", "circular", "2x4", "pipeline_gshard"),
    ],
)
def test_pipelined_equals_microbatches_one_after_another(name, pipeline, mesh, layout):
    """Stages and experts on axes of their own; the decoder's stages read the encoder's outputs of their microbatch."""
    sharded = Layout.of(DeviceMesh.parse(mesh), layout)
    executable = compiled(name, sharded, pipeline=pipeline, stages=2)
    found, wanted = harness.arrays(executable(inputs_of(name))), one_after_another(name)
    assert wanted["metrics/aux_loss"] > 0 and 0 <= wanted["metrics/overflow"] < 0.5
    for path, value in wanted.items():
        np.testing.assert_allclose(found[path], value, rtol=0, atol=TOLERANCE * np.abs(value).max(), err_msg=path)


def test_evaluation_equals_microbatches_one_after_another():
    """Without random numbers, on the platform that has forms of its own for most products."""

    def evaluated(**changes) -> dict[str, np.ndarray]:
        model = dataclasses.replace(MODELS["language_model"], **changes)

        def function(inputs: dict) -> dict:
            return {"metrics": model.loss(inputs["theta"], inputs["batch"], Context(platform="cpu"))[1]}

        return harness.run(function, inputs_of("language_model"))

    found, wanted = evaluated(pipeline="gpipe", stages=3), evaluated()
    for path, value in wanted.items():
        np.testing.assert_allclose(found[path], value, rtol=TOLERANCE, err_msg=path)


def test_weights_do_not_depend_on_the_pipeline():
    """A checkpoint of one schedule is restored with any other: paths and shapes are those of stored layers."""
    plain = tree.flatten(MODELS["translation"].weights())
    for pipeline, stages in (("gpipe", 2), ("circular", 2)):
        model = dataclasses.replace(MODELS["translation"], pipeline=pipeline, stages=stages)
        assert tree.flatten(model.weights()) == plain


def test_uneven_stages_store_all_layers_everywhere():
    """Devices hold equal parts of a stored weight; its shape is the same."""
    model = dataclasses.replace(MODELS["language_model"], pipeline="gpipe", stages=3)
    weight = tree.flatten(model.weights())["decoder/layer_0/feed_forward/wi"]
    assert weight.logical_axes == "rEMH" and weight.shape[0] == 4 and weight.is_repeated
    assert weight.columns == (3,) and weight.rows == (2,)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"pipeline": "gpip"}, "pipeline is 'gpip'; use one of none, gpipe, circular. Did you mean gpipe"),
        ({"pipeline": "gpipe", "stages": 5}, "stages is 5, but a stack repeats its pattern of layers 4 times"),
        ({"pipeline": "gpipe", "stages": 2, "remat": "none"}, "remat none. Use .*model.remat=full, keep_outputs"),
        ({"unroll": True, "remat": "none"}, "unroll is true"),
        ({"pipeline": "gpipe", "stages": 2, "dispatch": "gather"}, "dispatch is gather, manual.*use einsum or auto"),
        ({"num_groups": 6}, "num_groups is 6, which model.microbatches=4 does not divide"),
        ({"inference_num_groups": 6}, "inference_num_groups is 6, which model.microbatches=4 does not divide"),
    ],
)
def test_settings_that_do_not_fit_are_errors_with_a_remedy(changes, message):
    """When the experiment is read, not when it is compiled."""
    with pytest.raises(UserError, match=message):
        dataclasses.replace(MODELS["language_model"], **changes)
