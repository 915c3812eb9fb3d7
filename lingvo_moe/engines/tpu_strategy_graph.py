"""Builds and reads the graphs of the TPUStrategy engine for a slice that does not exist here.

The strategy asks a resolver only for the description of the slice, so a stand-in with the description of a real
topology gives real graphs. Only executing them needs a TPU.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import re
from typing import Any

import numpy as np

from lingvo_moe.engines.base import StepFunctions
from lingvo_moe.engines.tpu_strategy import Engine, Training
from lingvo_moe.lazy import tf

PROGRAMS = ("initialise", "train", "evaluate")
_HOST = (2, 2)  # chips of one host, along x and y
_JOB = "worker"
_STEP = re.compile(r"inference_train_step_\d+$")


@dataclasses.dataclass(frozen=True)
class Variable:
    """A sharded tensor of the state, as a graph describes it.

    Attributes:
      partition_dims: the number of shards along each dimension; empty if it is replicated.
      shard_shape: the shape of one core's variable.
      sharding: XLA's sharding, serialised.
      devices: the devices of its shards, in order.
      annotated: whether the values read from it and assigned to it have sharding annotations.
      itemsize: bytes of an element.
    """

    partition_dims: tuple[int, ...]
    shard_shape: tuple[int, ...]
    sharding: bytes
    devices: tuple[str, ...]
    annotated: bool
    itemsize: int


class TPUGraph:
    """A graph with programs for a TPU.

    Attributes:
      definition: the GraphDef.
    """

    def __init__(self, definition):
        self.definition = definition
        self._nodes = {node.name: node for node in definition.node}
        self._users: dict[str, list] = {}
        for node in definition.node:
            for name in node.input:
                self._users.setdefault(_node_name(name), []).append(node)

    def metadata(self) -> list:
        """Returns the TPUReplicateMetadata nodes, one for each program."""
        return [node for node in self.definition.node if node.op == "TPUReplicateMetadata"]

    def variables(self) -> dict[str, Variable]:
        """Returns the sharded tensors by path."""
        variables = {}
        for node in self.definition.node:
            shards = [self._nodes[_node_name(name)] for name in node.input]
            if node.op == "TPUPartitionedInputV2" and shards[0].op == "VarHandleOp":
                variables[shards[0].name] = Variable(
                    tuple(node.attr["partition_dims"].list.i),
                    tuple(d.size for d in shards[0].attr["shape"].shape.dim),
                    node.attr["_XlaSharding"].s,
                    tuple(shard.device for shard in shards),
                    self._annotated(node),
                    tf.as_dtype(shards[0].attr["dtype"].type).size,
                )
        return variables

    def handles(self) -> int:
        """Returns the number of variables of all cores."""
        return sum(node.op == "VarHandleOp" for node in self.definition.node)

    def loops(self) -> list:
        """Returns the outermost loops that run on the device."""
        return [
            node
            for node in self.definition.node
            if node.op in ("While", "StatelessWhile") and "_tpu_replicate" in node.attr
        ]

    def operators(self) -> dict[str, int]:
        """Returns the count of each operator in the graph, functions included."""
        counts: dict[str, int] = {}
        for node in itertools.chain(self.definition.node, *(f.node_def for f in self.definition.library.function)):
            counts[node.op] = counts.get(node.op, 0) + 1
        return counts

    def step(self) -> str:
        """Returns the digest of the function of one training step, see `digest`."""
        (function,) = [f.signature.name for f in self.definition.library.function if _STEP.search(f.signature.name)]
        return digest(self.definition.library, function)

    def bytes_per_core(self) -> int:
        """Returns the bytes of the state on each core."""
        return sum(math.prod(variable.shard_shape) * variable.itemsize for variable in self.variables().values())

    def _annotated(self, handle) -> bool:
        reads = [node for node in self._users[handle.name] if node.op == "ReadVariableOp"]
        values = [
            self._nodes[_node_name(node.input[1])] for node in self._users[handle.name] if node.op == "AssignVariableOp"
        ]
        users = [user for read in reads for user in self._users[read.name]]
        return bool(users or values) and all(node.op == "XlaSharding" for node in (*users, *values))


def build(
    chips: tuple[int, ...],
    steps: StepFunctions,
    batch_specs: dict,
    programs: tuple[str, ...] = PROGRAMS,
    count: int = 2,
) -> TPUGraph:
    """Builds programs for a slice.

    Args:
      chips: the chips of the slice along x, y and z, two cores each; a host has 2 x 2.
      steps: the step functions.
      batch_specs: the tree of `Spec`s of a batch.
      programs: which of PROGRAMS to build.
      count: the number of steps of a loop.
    """
    with tf.Graph().as_default() as graph:
        training = Training(stand_in(chips), steps, batch_specs)
        if "initialise" in programs:
            training.build_initialise(tf.compat.v1.placeholder(tf.int32, (2,)))
        if "train" in programs:
            training.build_train(_placeholders(training, count), count)
        if "evaluate" in programs:
            training.build_evaluate(_placeholders(training, 1))
    return TPUGraph(graph.as_graph_def())


# The gradient of a node, by a number that differs between traces; the gradients themselves are among the nodes.
_GRADIENT = "_gradient_op_type"


def digest(library, name: str) -> str:
    """Returns a digest of a function and of those it calls, equal for two traces of one Python function.

    Args:
      library: the FunctionDefLibrary.
      name: the name of the function.
    """
    functions = {function.signature.name: function for function in library.function}

    def of(function) -> str:
        text = hashlib.sha256()
        for node in function.node_def:
            attributes = {
                key: of(functions[value.func.name])
                if value.HasField("func")
                else value.SerializeToString(deterministic=True)
                for key, value in node.attr.items()
                if key != _GRADIENT
            }
            text.update(repr((node.name, node.op, list(node.input), sorted(attributes.items()))).encode())
        return text.hexdigest()

    return of(functions[name])


def stand_in(chips: tuple[int, ...]) -> Engine:
    """Returns the engine of a slice that does not exist here; see `build`."""
    from tensorflow.python.tpu.topology import Topology  # its constructor has no public name

    coordinates = _coordinates(chips)
    topology = Topology(mesh_shape=[*chips, 2], device_coordinates=coordinates)
    return Engine(_resolver(topology, *coordinates.shape[:2]), topology)


def _coordinates(chips: tuple[int, ...]) -> np.ndarray:
    """Returns `[hosts, cores of a host, 4]`: x, y, z and the index in its chip, of each core."""
    width, height, depth = chips
    cores = [
        [(x + dx, y + dy, z, core) for dy in range(_HOST[1]) for dx in range(_HOST[0]) for core in range(2)]
        for z in range(depth)
        for y in range(0, height, _HOST[1])
        for x in range(0, width, _HOST[0])
    ]
    return np.array(cores, np.int32)


def _resolver(topology: Any, hosts: int, cores: int):
    metadata = tf.tpu.experimental.TPUSystemMetadata(
        num_cores=hosts * cores,
        num_hosts=hosts,
        num_of_cores_per_host=cores,
        topology=topology,
        devices=[
            tf.config.LogicalDevice(f"/job:{_JOB}/replica:0/task:{host}/device:{kind}:{index}", kind)
            for host in range(hosts)
            for kind, count in (("CPU", 1), ("TPU", cores))
            for index in range(count)
        ],
    )

    class StandIn(tf.distribute.cluster_resolver.ClusterResolver):
        """Answers what a `TPUClusterResolver` would ask the slice."""

        environment = ""

        def get_tpu_system_metadata(self):
            return metadata

        def cluster_spec(self):
            return tf.train.ClusterSpec({_JOB: [f"host{host}:8470" for host in range(hosts)]})

        def master(self, task_type=None, task_id=None, rpc_layer=None):
            return ""

        def num_accelerators(self, task_type=None, task_id=None, config_proto=None):
            return {"TPU": cores}

    return StandIn()


def _placeholders(training: Training, count: int) -> dict:
    return {
        path: [tf.compat.v1.placeholder(spec.dtype, spec.shape) for spec in specs]
        for path, specs in training.feed(count).specs().items()
    }


def _node_name(tensor_name: str) -> str:
    return tensor_name.removeprefix("^").partition(":")[0]
