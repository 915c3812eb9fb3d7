"""The tool finds nothing wrong with a registered model's graph, and finds what is made wrong."""

from __future__ import annotations

import functools

import pytest

from lingvo_moe import experiment
from lingvo_moe.cli import app
from lingvo_moe.engines import tpu_strategy_graph
from lingvo_moe.engines.tpu_strategy_graph import TPUGraph
from tools import tpu_graph

MODEL = "m4.Small"  # 8 cores
SMALLER = ("model.num_layers=4", "model.num_experts=8", "input.batch_size=8", "model.num_groups=8")


@functools.cache
def graph() -> TPUGraph:
    model = experiment.get(MODEL, SMALLER)
    return tpu_strategy_graph.build((2, 2, 1), model.steps, model.batch_specs(), ("train",))


def spoilt(change) -> list[str]:
    """The faults after `change(definition)`."""
    definition = type(graph().definition)()
    definition.CopyFrom(graph().definition)
    change(definition)
    return tpu_graph.faults(TPUGraph(definition), experiment.get(MODEL, SMALLER).steps)


def first(definition, op: str):
    return next(node for node in definition.node if node.op == op)


def test_a_registered_model_is_as_it_must_be():
    assert spoilt(lambda definition: None) == []


@pytest.mark.parametrize(
    "attribute, value, said",
    [
        ("num_cores_per_replica", 4, "1 replicas of 4 cores"),
        ("num_replicas", 2, "2 replicas of 8 cores"),
        ("use_spmd_for_xla_partitioning", False, "not partitioned by SPMD"),
    ],
)
def test_a_program_over_other_cores_is_found(attribute, value, said):
    def change(definition):
        node = first(definition, "TPUReplicateMetadata")
        setattr(node.attr[attribute], "b" if isinstance(value, bool) else "i", value)

    assert spoilt(change) == [said]


def test_a_repeated_core_is_found():
    def change(definition):
        cores = first(definition, "TPUReplicateMetadata").attr["device_assignment"].list.i
        cores[:4] = cores[4:8]

    assert spoilt(change) == ["the device assignment is no permutation of the cores"]


def test_a_distributed_weight_that_is_placed_whole_is_found():
    expert = "theta/encoder/layer_1/feed_forward/wi"

    def change(definition):
        node = next(node for node in definition.node if node.op == "TPUPartitionedInputV2" and node.input[0] == expert)
        del node.attr["partition_dims"].list.i[:]
        (handle,) = [node for node in definition.node if node.name == expert]
        handle.attr["shape"].shape.dim[1].size = 8

    (said,) = spoilt(change)
    assert said.startswith(f"{expert}: cut as () into (1, 8, ")


def test_a_lost_annotation_is_found():
    def change(definition):
        read = next(
            node
            for node in definition.node
            if node.op == "ReadVariableOp" and node.input[0].startswith("TPUPartitioned")
        )
        next(node for node in definition.node if read.name in node.input).op = "Identity"

    (said,) = spoilt(change)
    assert said.endswith("read or assigned without its place")


def test_a_name_that_is_none_is_told(capsys):
    assert app.execute(tpu_graph.main, ["tpu_graph", "--only=m5"], tpu_graph._VALUES) == 2
    assert "--only=m5: in no name of m4.Dense96L" in capsys.readouterr().err
