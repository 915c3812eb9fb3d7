"""Protects the remedies of a plan that does not fit: each changes something, and the predicted size is the least."""

from __future__ import annotations

import dataclasses
import importlib
import pathlib

import pytest

from lingvo_moe import experiment
from lingvo_moe.analysis import layout_space, plan_text, remedies
from lingvo_moe.analysis.cost_model import CostModel
from lingvo_moe.analysis.plan import Plan
from lingvo_moe.engines.cluster import Cluster
from lingvo_moe.engines.topology import Slice
from lingvo_moe.sharding.layout import DeviceMesh

for family in ("dense_lm", "m4", "unet"):
    importlib.import_module(f"params.{family}")

_TOO_LARGE = pathlib.Path(__file__).parents[2] / "docs" / "plans" / "m4.MoE128E12L.capacity_of_a6.json"
_EVERYTHING = {"mesh": "8", "devices": 8, "layout": "auto", "remat": "none", "batch_size": 16}


def _plan(**changes) -> Plan:
    return dataclasses.replace(Plan.load(_TOO_LARGE), **{**_EVERYTHING, "activation_dtype": "float32", **changes})


_BATCH, _REMAT, _NARROW, _UPDATE, _TWO_AXES = (
    "input.batch_size=",
    "model.remat=full",
    "activation_dtype=bfloat16",
    "layout=gshard_sharded_update",
    "--mesh=4x2 --set layout=gspmd",
)
_ALL = (_BATCH, _REMAT, _NARROW, _UPDATE, _TWO_AXES)


@pytest.mark.parametrize(
    ("changes", "without"),
    [
        ({}, ()),
        ({"activation_dtype": "bfloat16"}, (_NARROW,)),
        ({"remat": "full"}, (_REMAT,)),
        ({"batch_size": 8}, (_BATCH,)),  # a row for each device
        ({"layout": "gshard_sharded_update"}, (_UPDATE,)),
        ({"mesh": "4x2"}, (_UPDATE, _TWO_AXES)),
        ({"layout": "spatial"}, (_UPDATE, _TWO_AXES)),
        ({"mesh": "7", "devices": 7}, (_TWO_AXES,)),
        ({"mesh": "1", "devices": 1}, (_UPDATE, _TWO_AXES)),
    ],
)
def test_a_remedy_changes_something(changes, without):
    """What the plan has already is not offered, nor a layout for another number of mesh axes."""
    text = plan_text.text(_plan(**changes), 1e12)
    assert [remedy in text for remedy in _ALL] == [remedy not in without for remedy in _ALL]
    assert "more cores" in text and "--search=remat,mesh,groups,batch tries some" in text


def test_decoding_has_neither_a_policy_nor_a_search():
    """Its batch is another field."""
    text = plan_text.text(_plan(program="decode"), 1e12)
    assert "decoding_batch=" in text and not any(word in text for word in (_BATCH, "remat", "--search"))


def test_a_generation_without_a_clock_has_no_search():
    """`plan --search` refuses it."""
    assert "--search" not in plan_text.text(_plan(topology="tpu7x:2x2x1"), 1e12)


def test_a_dense_model_has_no_groups_to_search():
    """And GPUs are called so."""
    text = plan_text.text(_plan(num_experts=0, topology="h100:1x8"), 1e12)
    assert "--search=remat,mesh,batch tries" in text and "more GPUs" in text


def test_a_model_of_volumes_has_neither_a_policy_nor_layouts_of_transformers():
    """Of one device, whose layout may be `auto`; a smaller batch, bfloat16 and a search for a mesh remain."""
    text = plan_text.text(_plan(unit="voxels", num_experts=0, mesh="1", devices=1), 1e12)
    assert [remedy in text for remedy in _ALL] == [True, False, True, False, False]
    assert "--search=mesh,batch tries some" in text


def _fits(config: experiment.Experiment, mesh: str, target: Slice | Cluster) -> bool:
    config = dataclasses.replace(config, mesh=DeviceMesh.parse(mesh))
    return CostModel(config, target).estimate(layout_space.registered(config)).fits


def test_the_least_number_of_nodes_is_predicted():
    """64B weights on one node: doubled until they fit, and half as many do not."""
    config = experiment.get("dense_lm.Dense64BMesh8x16", (), DeviceMesh.parse("4x2"))
    node = Cluster("h100:1x8", "h100", 1, 8, tuple(range(8)))
    found = remedies.sufficient(config, node)
    assert found is not None
    nodes = found.mesh.size // 8
    assert found.topology == f"h100:{nodes}x8" and nodes > 2 and found.estimate.fits
    half = Cluster(f"h100:{nodes // 2}x8", "h100", nodes // 2, 8, tuple(range(nodes * 4)))
    for columns in (2, 4, 8):
        assert not _fits(config, f"{nodes * 4 // columns}x{columns}", half)
    from_half = remedies.sufficient(dataclasses.replace(config, mesh=DeviceMesh((nodes * 2, 2))), half)
    assert from_half is not None and from_half.topology == found.topology
    text = plan_text.text(_plan(), 1e12, sufficient=found)
    assert f"predicted to fit: --topology=h100:{nodes}x8 --mesh={found.mesh}, " in text and "GiB [m]" in text


@pytest.mark.parametrize(
    ("name", "chips", "doublings", "expected"),
    [
        ("v3:2x2x1", (2, 2, 1), 1, "v3:4x2x1"),
        ("v3:2x2x1", (2, 2, 1), 2, "v3:4x4x1"),
        ("v5e:4x8", (4, 8), 1, "v5e:8x8"),
        ("v4:2x2x1", (2, 2, 1), 1, "v4:2x2x2"),
        ("v5p:2x2x2", (2, 2, 2), 3, "v5p:4x4x4"),
    ],
)
def test_slices_grow_along_their_shortest_side(name, chips, doublings, expected):
    """A slice of two dimensions stays one."""
    target = Slice(name, name.partition(":")[0], chips, tuple(range(8)))
    larger = remedies._larger(target, doublings)
    assert larger.name == expected and len(larger.devices) == 8 * 2**doublings


@pytest.mark.parametrize(
    ("nodes", "gpus", "doublings", "expected"),
    [(1, 1, 1, "h100:1x2"), (1, 1, 4, "h100:2x8"), (1, 8, 1, "h100:2x8"), (3, 4, 2, "h100:6x8"), (2, 6, 1, "h100:4x6")],
)
def test_clusters_grow_within_a_node_first(nodes, gpus, doublings, expected):
    """Its GPUs are connected by NVLink; several nodes of one GPU would use the network."""
    target = dataclasses.replace(
        Cluster.of("h100:1x1"), nodes=nodes, gpus_per_node=gpus, devices=tuple(range(nodes * gpus))
    )
    larger = remedies._larger(target, doublings)
    assert larger.name == expected and len(larger.devices) == nodes * gpus * 2**doublings


def test_no_slice_is_offered_that_does_not_exist():
    """What fits 512 chips of TPU v5e fits no slice of it, which have at most 256; of TPU v3 it does."""
    config = experiment.get("dense_lm.Dense128B", (), DeviceMesh.parse("16x8"))
    largest = Slice("v5e:16x8", "v5e", (16, 8), tuple(range(128)))
    assert remedies.sufficient(config, largest) is None
    found = remedies.sufficient(config, dataclasses.replace(largest, name="v3:8x8x1", generation="v3", chips=(8, 8, 1)))
    assert found is not None and found.mesh.size > 256 and found.topology.startswith("v3:")


def test_an_unknown_model_has_no_prediction():
    """The cost model knows Transformers of texts."""
    config = experiment.unchecked("unet.Small")
    target = Slice("v3:2x2x1", "v3", (2, 2, 1), tuple(range(8)))
    assert remedies.sufficient(dataclasses.replace(config, mesh=DeviceMesh((8,))), target) is None
