"""Protects the space of layouts: every candidate is legal, the papers' are among them, an empty space is an error."""

from __future__ import annotations

import importlib
import random

import pytest

from lingvo_moe import experiment, tree
from lingvo_moe.analysis import layout_space
from lingvo_moe.analysis.layout_space import Space
from lingvo_moe.errors import UserError
from lingvo_moe.sharding.layout import DeviceMesh, Layout

for family in ("dense_lm", "hybrid_lm", "m4", "sparse_lm"):
    importlib.import_module(f"params.{family}")


def sample(name: str, devices: int, count: int, **fields):
    """Returns some of all candidates, and the experiment."""
    config = experiment.unchecked(name)
    found = list(layout_space.candidates(config, Space(devices, (config.input.batch_size,), **fields)))
    return config, random.Random(0).sample(found, min(count, len(found)))


@pytest.mark.parametrize(("name", "devices"), [("dense_lm.Small", 8), ("hybrid_lm.Small", 16), ("m4.Small", 8)])
def test_every_candidate_is_legal(name, devices):
    """The experiment accepts its settings, devices divide every weight, and no mesh axis shards a tensor twice."""
    _, candidates = sample(name, devices, 100)
    for candidate in candidates:
        config = experiment.unchecked(name)
        config = experiment.get(name, candidate.changes(config))
        layout = Layout.of(config.mesh, config.layout)
        assert config.mesh.size == devices and layout.rules == candidate.layout.rules
        declared = config.model.weights()
        for weight in tree.flatten({"w": declared, "o": config.optimizer.state(declared)}).values():
            for size, axis in zip(weight.shape, layout.mesh_axes(weight.logical_axes)):
                assert size % layout.mesh.axis_size(axis) == 0, (candidate, weight)
        for axes in ("BTM", "BTND", "BNTL", "BTH", "BTV", "GSM", "GSEC", "GECM", "EGCM", "EGCH", "EMH", "EHM"):
            for legal in (layout, layout.within_stages()):
                used = [axis for axis in legal.mesh_axes(axes) if axis]
                assert len(used) == len(set(used))


@pytest.mark.parametrize(
    "name",
    ["m4.MoE2048E36L", "dense_lm.Dense64BMesh8x16", "hybrid_lm.MoE33B8E", "dense_lm.Narrow16BMesh32x8"],
)
def test_the_papers_layouts_are_among_the_candidates(name):
    """All matrices are sharded as the registered layout shards them."""
    config = experiment.get(name)
    remat, own = (config.model.remat,), layout_space.registered(config).layout
    space = Space(config.mesh.size, (config.input.batch_size,), config.mesh, remat, ("none",), None, 1)
    matrices = [axes for axes in layout_space.tensors_of(config) if len(axes.lstrip("R")) > 1]
    wanted = [own.dims_mapping(axes) for axes in matrices]
    found = [c for c in layout_space.candidates(config, space) if c.mesh == config.mesh]
    assert any([c.layout.dims_mapping(axes) for axes in matrices] == wanted for c in found)


def test_pipelines_have_their_stages_on_the_first_axis():
    """As many stages as devices of it, at least as many microbatches, and a policy that recomputes."""
    _, candidates = sample("dense_lm.Small", 8, 1000, pipelines=("gpipe",))
    assert candidates
    for candidate in candidates:
        assert candidate.stages == candidate.mesh.shape[0] <= candidate.microbatches and candidate.remat != "none"
        assert candidate.layout.mesh_axes("P") == (candidate.mesh.axis_names[0],)


def test_stacks_of_different_depth_have_pipelines_that_divide_both():
    """An encoder of 8 and a decoder of 4 layers, in repeats of two: two stages, of which one stack has two rounds."""
    assignments = ["model.num_layers=12", "model.num_encoder_layers=8"]
    config = experiment.unchecked("m4.Small", assignments)
    found = list(layout_space.candidates(config, Space(8, (config.input.batch_size,), pipelines=("gpipe", "circular"))))
    assert {(candidate.pipeline, candidate.stages) for candidate in found} == {("gpipe", 2), ("circular", 2)}
    for candidate in random.Random(0).sample(found, 20):
        experiment.get("m4.Small", [*assignments, *candidate.changes(config)])


def test_relative_positions_have_no_microbatches():
    """Their model would refuse the settings of others."""
    config = experiment.unchecked("m4.Small", ["model.relative_buckets=8"])
    found = layout_space.candidates(config, Space(8, (config.input.batch_size,), DeviceMesh((4, 2))))
    assert {(candidate.pipeline, candidate.stages, candidate.microbatches) for candidate in found} == {("none", 1, 1)}


def test_what_is_given_does_not_vary():
    """One mesh, one policy, one number of microbatches."""
    _, candidates = sample("hybrid_lm.Small", 8, 500, mesh=DeviceMesh((4, 2)), remats=("full",), microbatches=2)
    assert candidates
    assert {(str(c.mesh), c.remat, c.microbatches) for c in candidates} == {("4x2", "full", 2)}


def test_no_candidate_is_there_twice():
    """Two sets of rules that shard all matrices alike are one: weights, optimizer state and activations."""
    config, candidates = sample("hybrid_lm.Small", 8, 10**6, remats=("full",), microbatches=1, pipelines=("none",))
    matrices = [axes for axes in layout_space.tensors_of(config) if len(axes.lstrip("Rr")) > 1]
    keys = [(c.mesh.shape, *(c.layout.dims_mapping(axes) for axes in matrices)) for c in candidates]
    assert len(keys) == len(set(keys)) > 1000


def test_an_empty_space_is_an_error():
    """Seven devices divide nothing of this model."""
    config = experiment.unchecked("dense_lm.Small")
    with pytest.raises(UserError, match="--search=layout: no legal layout on a mesh of 7 devices"):
        list(layout_space.candidates(config, Space(7, (config.input.batch_size,))))
    with pytest.raises(UserError, match="no legal layout on the mesh 5x3.*Leave out --mesh"):
        list(layout_space.candidates(config, Space(15, (config.input.batch_size,), DeviceMesh((5, 3)))))
    with pytest.raises(UserError, match=r"pipeline none, gpipe, circular, stages 3, microbatches 2\)"):
        list(layout_space.candidates(config, Space(7, (config.input.batch_size,), stages=3, microbatches=2)))
