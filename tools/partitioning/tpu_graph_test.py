"""Tests that a registered model's graph passes the checks, and that each kind of mistake is found."""

from __future__ import annotations

import functools

import pytest

from lingvo_moe import experiment
from lingvo_moe.cli import app
from lingvo_moe.engines import tpu_strategy_graph
from lingvo_moe.engines.tpu_strategy_graph import TPUGraph
from tools.partitioning import tpu_graph

MODEL = "m4.Small"  # 8 cores
SMALLER = ("model.num_layers=4", "model.num_experts=8", "input.batch_size=8", "model.num_groups=8")


@functools.cache
def graph() -> TPUGraph:
    model = experiment.get(MODEL, SMALLER)
    return tpu_strategy_graph.build((2, 2, 1), model.steps, model.batch_specs(), ("train",))


def problems_after(change) -> list[str]:
    """Returns the problems of the graph after `change(definition)`."""
    definition = type(graph().definition)()
    definition.CopyFrom(graph().definition)
    change(definition)
    return tpu_graph.problems(TPUGraph(definition), experiment.get(MODEL, SMALLER).steps)


def first(definition, op: str):
    return next(node for node in definition.node if node.op == op)


@pytest.mark.slow
def test_registered_model_has_no_problems():
    """Protects the checks against false alarms."""
    assert problems_after(lambda definition: None) == []


@pytest.mark.parametrize(
    "attribute, value, problem",
    [
        ("num_cores_per_replica", 4, "1 replicas of 4 cores"),
        ("num_replicas", 2, "2 replicas of 8 cores"),
        ("use_spmd_for_xla_partitioning", False, "not partitioned by SPMD"),
    ],
)
def test_wrong_replication_is_found(attribute, value, problem):
    """Protects the check of replicas, cores and partitioner."""

    def change(definition):
        node = first(definition, "TPUReplicateMetadata")
        setattr(node.attr[attribute], "b" if isinstance(value, bool) else "i", value)

    assert problems_after(change) == [problem]


def test_repeated_core_is_found():
    """Protects the check of the device assignment."""

    def change(definition):
        cores = first(definition, "TPUReplicateMetadata").attr["device_assignment"].list.i
        cores[:4] = cores[4:8]

    assert problems_after(change) == ["the device assignment is not a permutation of the cores"]


def test_replicated_expert_weight_is_found():
    """Protects the check of a distributed weight's sharding."""
    expert = "theta/encoder/layer_1/feed_forward/wi"

    def change(definition):
        node = next(node for node in definition.node if node.op == "TPUPartitionedInputV2" and node.input[0] == expert)
        del node.attr["partition_dims"].list.i[:]
        (handle,) = [node for node in definition.node if node.name == expert]
        handle.attr["shape"].shape.dim[1].size = 8

    (problem,) = problems_after(change)
    assert problem.startswith(f"{expert}: sharded as () into (1, 8, ")


def test_lost_annotation_is_found():
    """Protects the check that every read and assignment is annotated."""

    def change(definition):
        read = next(
            node
            for node in definition.node
            if node.op == "ReadVariableOp" and node.input[0].startswith("TPUPartitioned")
        )
        next(node for node in definition.node if read.name in node.input).op = "Identity"

    (problem,) = problems_after(change)
    assert problem.endswith("read or assigned without its sharding")


@pytest.mark.parametrize("given, message", [("Smal1", "Did you mean m4.Small"), ("m4.Small,", "an item is empty")])
def test_unknown_name(given, message, capsys):
    """The error names the nearest; a final comma would choose all models, and take hours."""
    assert app.execute(tpu_graph.main, ["tpu_graph", f"--only={given}"], tpu_graph._VALUES) == 2
    assert message in capsys.readouterr().err
