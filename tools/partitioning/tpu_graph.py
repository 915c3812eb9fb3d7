"""Builds the training graph of models for their whole TPU slice, without a TPU, and checks it.

    python -m tools.partitioning.tpu_graph [--only=MoE128E12L,MoE512E12L] [--steps_per_loop=100]

Each model's own step, at its registered size, goes through `tf.distribute.TPUStrategy` as on a slice: one replica over
all cores, a variable on each core for its shard of every tensor of the state, a loop of steps on the device. 128 cores
take half a minute, 2048 six or more, and 6 GiB of memory.
"""

from __future__ import annotations

import gc
import time

import numpy as np
from absl import flags

from lingvo_moe import experiment, registry, tree
from lingvo_moe.cli import app
from lingvo_moe.engines import tpu_strategy_graph
from lingvo_moe.engines.base import StepFunctions
from lingvo_moe.engines.topology import v3_slice
from lingvo_moe.engines.tpu_strategy_graph import TPUGraph
from lingvo_moe.engines.tpu_strategy_variables import TensorSharding
from lingvo_moe.errors import UserError

_VALUES = flags.FlagValues()
flags.DEFINE_list(
    "only", [], "parts of names of M4 models; default: all that are made for a TPU slice", flag_values=_VALUES
)
flags.DEFINE_integer("steps_per_loop", 100, "training steps of one call", lower_bound=1, flag_values=_VALUES)


def main(arguments: list[str]):
    """Prints a row for each model; raises UserError for a wrong graph."""
    app.no_arguments(arguments[1:])
    found = [name for name in registry.names() if name.startswith("m4.") and experiment.get(name).mesh.size % 8 == 0]
    names = app.chosen_names("--only", _VALUES.only, found, lambda part, name: part in name)
    row = "{:20} {:>6} {:>10} {:>10} {:>10} {:>12} {:>8}".format
    print(row("model", "cores", "tensors", "variables", "sharded", "GiB per core", "seconds"), flush=True)
    for name in names:
        print(row(name, *_check(name)), flush=True)
        gc.collect()  # a graph has reference cycles, and takes gigabytes


def _check(name: str) -> tuple:
    """Builds and checks a model's training graph; returns the columns of its row."""
    start, model = time.monotonic(), experiment.get(name)
    chips = tuple(map(int, v3_slice(model.mesh.size).partition(":")[2].split("x")))
    graph = tpu_strategy_graph.build(chips, model.steps, model.batch_specs(), ("train",), _VALUES.steps_per_loop)
    if found := problems(graph, model.steps):
        raise UserError(f"{name}: {'; '.join(found[:6])}")
    variables = graph.variables()
    num_sharded = sum(bool(variable.partition_dims) for variable in variables.values())
    return (
        model.mesh.size,
        len(variables),
        graph.handles(),
        num_sharded,
        f"{graph.bytes_per_core() / 2**30:.2f}",
        f"{time.monotonic() - start:.0f}",
    )


def problems(graph: TPUGraph, steps: StepFunctions) -> list[str]:
    """Returns the problems of a training graph, a line each."""
    return [*_check_programs(graph, steps.layout.mesh.size), *_check_variables(graph, steps)]


def _check_programs(graph: TPUGraph, num_cores: int) -> list[str]:
    found = []
    if len(graph.metadata()) != 1:
        found.append(f"{len(graph.metadata())} programs instead of one")
    for node in graph.metadata():
        assignment = np.reshape(node.attr["device_assignment"].list.i, (-1, 4))
        if (node.attr["num_replicas"].i, node.attr["num_cores_per_replica"].i) != (1, num_cores):
            found.append(f"{node.attr['num_replicas'].i} replicas of {node.attr['num_cores_per_replica'].i} cores")
        if not node.attr["use_spmd_for_xla_partitioning"].b:
            found.append("not partitioned by SPMD")
        if len(np.unique(assignment, axis=0)) != num_cores or len(assignment) != num_cores:
            found.append("the device assignment is not a permutation of the cores")
    if len(graph.loops()) != 1:
        found.append(f"{len(graph.loops())} loops on the device instead of one")
    return found


def _check_variables(graph: TPUGraph, steps: StepFunctions) -> list[str]:
    specs, variables = tree.flatten(steps.state_specs()), graph.variables()
    found = [f"{path}: not in both graph and state" for path in sorted(specs.keys() ^ variables.keys())]
    if graph.handles() != steps.layout.mesh.size * len(specs):
        found.append(f"{graph.handles()} variables instead of one per core and tensor")
    for path in sorted(specs.keys() & variables.keys()):
        sharding, variable = TensorSharding(specs[path], steps.layout), variables[path]
        if (list(variable.partition_dims), variable.shard_shape) != (sharding.partition_dims, sharding.shard_shape):
            found.append(f"{path}: sharded as {variable.partition_dims} into {variable.shard_shape}")
        if len(set(variable.devices)) != steps.layout.mesh.size:
            found.append(f"{path}: on {len(set(variable.devices))} cores")
        if not variable.annotated:
            found.append(f"{path}: read or assigned without its sharding")
    return found


if __name__ == "__main__":
    app.run(main, _VALUES)
