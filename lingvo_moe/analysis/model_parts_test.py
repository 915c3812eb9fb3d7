"""Protects the description of a step's parts: FLOPs are those of `flops`, tensors those that layers annotate."""

from __future__ import annotations

import dataclasses
import importlib
import math

import pytest

from lingvo_moe import experiment
from lingvo_moe.analysis import flops, layout_space, model_parts
from lingvo_moe.errors import UserError
from lingvo_moe.sharding.layout import DeviceMesh, Layout
from lingvo_moe.steps import Steps

for family in ("conformer", "dense_lm", "hybrid_lm", "m4", "sparse_lm", "unet"):
    importlib.import_module(f"params.{family}")


def _forward_flops(config) -> float:
    """Twice the multiplications of all forward products, without one-hot products."""
    total = 0.0
    repeats = config.model.num_layers // config.model.layers_per_repeat
    for part in model_parts.parts_of(config, config.input.batch_size, 1):
        sizes = dict(part.sizes)
        for step in part.steps:
            if step.product and not step.product.is_lookup and part.name not in ("dispatch", "combine"):
                axes = {axis for tensor in step.product.tensors for axis in tensor.axes}
                copies = max(step.product.left.copies, step.product.right.copies)
                times = part.count * (repeats if part.stack else 1)
                total += 2 * times * copies * math.prod(sizes[axis] for axis in axes)
    return total


@pytest.mark.parametrize(
    "name, settings",
    [
        ("dense_lm.Dense64BMesh8x16", []),
        ("m4.Dense96L", []),
        ("m4.Dense96L", ["model.layer_pattern=dense:gated=true"]),
        ("hybrid_lm.MoE33B8E", []),
        ("m4.MoE2048E36L", []),
    ],
)
def test_products_have_the_flops_of_a_step(name, settings):
    """The backward pass has twice as many. The router's product is 2.6 % of those of 2048 experts."""
    config = experiment.get(name, settings)
    assert 3 * _forward_flops(config) == pytest.approx(flops.training_step(config.model, config.input), rel=1e-12)


def test_flops_count_the_softmax_once():
    """Of tied embeddings, too, whose table is looked up besides; of a sampled softmax, its candidates alone."""
    settings = ["model.tied_embeddings=false", "model.sampled_softmax=0"]
    whole = experiment.get("m4.Quickstart", settings)
    tied = experiment.get("m4.Quickstart", ["model.tied_embeddings=true", "model.sampled_softmax=0"])
    sampled = experiment.get("m4.Quickstart", [settings[0], "model.sampled_softmax=1000"])
    found = [flops.training_step(each.model, each.input) for each in (whole, tied, sampled)]
    model, lengths = whole.model, whole.input.lengths
    saved = 6 * whole.input.batch_size * lengths["target"] * model.model_dim * (model.target_vocabulary - 1000)
    assert found[0] == found[1] == found[2] + saved


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hybrid_lm.Small", "m4.Small"])
def test_layers_annotate_no_tensor_that_the_parts_lack(name, monkeypatch):
    """A layout that is legal for the parts is then legal for the program."""
    annotated = set()

    def record(self, tensor, logical_axes):
        annotated.add(logical_axes.lstrip("R"))
        return tensor

    config = experiment.unchecked(name, ["model.num_layers=4"])
    config = dataclasses.replace(config, mesh=DeviceMesh((1,)), platform="tpu")
    # Rows of source tokens are BS in a batch; no rule of the search names S.
    known = {"BS", *(axes.lstrip("R") for axes in layout_space.tensors_of(config))}
    monkeypatch.setattr(Layout, "annotate", record)
    Steps(config.model, config.optimizer, Layout(), "tpu").train(config.batch_specs())
    # Vectors, masks and random numbers have a subset of the logical axes of another tensor, in its order.
    lacking = {axes for axes in annotated if not any(_is_part(axes, of) for of in known)}
    assert not lacking


def _is_part(axes: str, of: str) -> bool:
    remaining = iter(of)
    return all(axis in remaining for axis in axes.replace("m", "").replace("e", ""))


@pytest.mark.parametrize(
    ("name", "assignments", "pattern"),
    [
        ("unet.Small", (), "not a UNet; use --search=mesh"),
        ("conformer.Small", (), "Transformers of texts, not a .*; use --search=remat,mesh"),
        ("m4.Quickstart", (), "--set model.unroll=false"),
        ("m4.Quickstart", ("model.unroll=false",), "--set model.sampled_softmax=0"),
    ],
)
def test_models_whose_parts_are_not_known_are_refused(name, assignments, pattern):
    """The error has a remedy."""
    with pytest.raises(UserError, match=pattern):
        model_parts.model_of(experiment.unchecked(name, assignments))
