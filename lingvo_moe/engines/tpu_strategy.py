"""The TPUStrategy engine: trains on a Cloud TPU slice through TensorFlow's own runtime.

All cores are one replica. XLA's SPMD partitioner shards its program by the annotations of the step functions, the same
as in the PJRT engine's programs. One call runs many steps in a loop on the device. No JAX is involved.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from lingvo_moe import tree
from lingvo_moe.engines.base import StepFunctions, torus_order
from lingvo_moe.engines.tpu_strategy_variables import ShardedVariable, TensorSharding
from lingvo_moe.errors import UserError
from lingvo_moe.lazy import tf
from lingvo_moe.ops import precision
from lingvo_moe.program import COMPILER_DEFAULT, DIAGNOSED, Program
from lingvo_moe.sharding import spmd
from lingvo_moe.sharding.layout import Layout, Spec

# The newest TensorFlow that is built for Cloud TPU virtual machines.
TPU_TENSORFLOW = "tensorflow-tpu==2.20.0"
_CONNECT_SECONDS = 10.0


class Engine:
    """The protocol `base.Engine` on a TPU slice, all of whose cores are one replica; it only trains.

    Attributes:
      strategy: the `tf.distribute.TPUStrategy`.
      devices: TensorFlow's names of all cores, by their number in the mesh.
      hosts: for each core the CPU device of its host.
    """

    platform = "tpu"

    def __init__(self, resolver, topology):
        """Takes a slice that has been initialised; `connect` finds and initialises one.

        Args:
          resolver: the `tf.distribute.cluster_resolver.TPUClusterResolver`.
          topology: what initialising it returned.
        """
        # `DeviceAssignment.build` takes the chips in a ring.
        cores = np.reshape(topology.device_coordinates, (-1, topology.mesh_rank))
        ordered = sorted(cores.tolist(), key=lambda each: torus_order(each[:-1], each[-1]))
        assignment = tf.tpu.experimental.DeviceAssignment(topology, np.array([ordered]))
        self.strategy = tf.distribute.TPUStrategy(
            resolver, experimental_device_assignment=assignment, experimental_spmd_xla_partitioning=True
        )
        job = tf.DeviceSpec.from_string(self.strategy.extended.worker_devices[0]).job
        cores = range(assignment.num_cores_per_replica)
        self.devices = [assignment.tpu_device(logical_core=core, job=job) for core in cores]
        self.hosts = [assignment.host_device(logical_core=core, job=job) for core in cores]

    @staticmethod
    def connect(tpu: str) -> Engine:
        """Finds and initialises a slice.

        Args:
          tpu: `local` on the virtual machine of a slice with a single one; for larger slices the slice's name, or
            `grpc://HOST:PORT` of its first machine.

        Raises:
          UserError: no TPU can be reached, or TensorFlow has no support for it.
        """
        if not tpu:
            raise UserError(
                "--tpu is missing: the name of the slice, or local on the virtual machine of a small slice."
            )
        _check_answers(tpu)
        with _connection_errors(tpu):
            resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=tpu)
            # Batches and curves are made on this machine, where their files are; only `Training` uses the slice.
            tf.config.experimental_connect_to_cluster(resolver, make_master_device_default=False)
            return Engine(resolver, tf.tpu.experimental.initialize_tpu_system(resolver))

    def training(self, steps: StepFunctions, batch_specs: dict, evaluates: bool = True) -> Training:
        """Allocates a model's state; each program is compiled when it first runs, so `evaluates` does not matter.

        Raises:
          UserError: the mesh does not have as many devices as the slice has cores, or does not divide a dimension that
            it shards.
        """
        return Training(self, steps, batch_specs)

    def compile(self, program: Program) -> NoReturn:
        """Raises UserError: the slice runs step functions that TensorFlow compiles, not lowered programs."""
        raise _cannot(f"run the program {program.name}")

    def evaluation(self, steps: StepFunctions, batch_specs: dict) -> NoReturn:
        """Raises UserError: only `Training` evaluates here."""
        raise _cannot("evaluate a checkpoint")

    def decoding(self, steps: StepFunctions, source_specs: dict, search: Any) -> NoReturn:
        """Raises UserError: there is no beam search through TensorFlow's runtime."""
        raise _cannot("decode")


def _cannot(what: str) -> UserError:
    return UserError(f"the tpu_strategy engine cannot {what}; use --engine=pjrt, which reads the same checkpoints.")


class Training:
    """The protocol `base.Training` on a slice.

    Attributes:
      state: the tree of the training state; its leaves are `ShardedVariable`s, without values until `initialise` or
        `load`.
      shardings: None, because `ShardedVariable.load` reads a checkpoint shard by shard.
      rows: all rows of a batch; one process feeds the whole slice.
    """

    shardings = None

    def __init__(self, engine: Engine, steps: StepFunctions, batch_specs: dict):
        """Allocates the state; raises as `Engine.training`."""
        if steps.layout.mesh.size != len(engine.devices):
            raise UserError(
                f"the slice has {len(engine.devices)} cores, the mesh is {steps.layout.mesh}; pass "
                f"--mesh={len(engine.devices)}, or a slice of {steps.layout.mesh.size} cores."
            )
        if steps.windowed_einsum_mib != COMPILER_DEFAULT:
            raise _cannot(f"compile with windowed_einsum_mib={steps.windowed_einsum_mib}")
        # TensorFlow compiles a step function when it first runs.
        precision.set_matmul_precision(steps.matmul_precision)
        self._engine, self._steps, self._batch_specs = engine, steps, batch_specs
        self.rows = range(next(iter(tree.flatten(batch_specs).values())).shape[0])
        with engine.strategy.scope():
            self.state = tree.unflatten(
                {path: self._variable(path, spec) for path, spec in tree.flatten(steps.state_specs()).items()}
            )
        self._initialise, self._train, self._evaluate, self._diagnose = (
            tf.function(build, autograph=False)
            for build in (self.build_initialise, self.build_train, self.build_evaluate, self.build_diagnose)
        )

    def initialise(self, seed: int):
        """Creates the state; each core initialises its own shards."""
        with self._on_first_host():
            self._initialise(tf.constant([0, seed], tf.int32))

    def load(self, state: Mapping[str, Any]):
        """Assigns a state shard by shard.

        Args:
          state: a tree with the paths of `self.state`, of arrays or of anything that `ShardedVariable.load` reads.

        Raises:
          UserError: the tree has other paths or shapes.
        """
        _assign(self.state, state)

    def load_weights(self, theta: Mapping[str, Any]):
        """Assigns the weights of the state as `load` does; raises UserError for those of another model."""
        _assign(self.state["theta"], theta)

    def set_weight(self, path: str, value: np.ndarray):
        """Assigns one weight shard by shard."""
        tree.flatten(self.state["theta"])[path].load(value)

    def train(self, batches: Sequence[dict]) -> dict[str, tf.Tensor]:
        """Runs one step for each batch, all in one loop on the device; each number of batches compiles its own loop.

        Returns:
          The metrics of the last step. Reading one waits for the loop.
        """
        shards = self.feed(len(batches)).send(batches)
        with self._on_first_host():
            return self._train(shards, len(batches))

    def evaluate(self, batch: dict) -> dict[str, tf.Tensor]:
        """Returns the metrics of one batch."""
        shards = self.feed(1).send([batch])
        with self._on_first_host():
            return self._evaluate(shards)

    def diagnose(self, batch: dict, step: int) -> dict:
        """Runs `steps.diagnose_function` for the step after `step` steps, with the current weights."""
        shards = self.feed(1).send([batch])
        with self._on_first_host():
            return tree.unflatten(self._diagnose(shards, tf.constant(step)))

    def feed(self, count: int) -> Feed:
        """Returns the feed of `count` batches."""
        return Feed(self._engine, self._batch_specs, self._steps.layout, count)

    def build_initialise(self, seed: tf.Tensor):
        """Adds the program of `initialise` to the graph."""
        leaves = tree.flatten(self.state)

        def program(handles: dict, seed: tf.Tensor):
            values = tree.flatten(self._steps.init_function({"seed": seed})["state"])
            for path, variable in leaves.items():
                variable.write(handles[path], values[path])

        self._run(program, leaves, seed)

    def build_train(self, shards: dict[str, list[tf.Tensor]], count: int) -> dict[str, tf.Tensor]:
        """Adds the program of `train` to the graph.

        Args:
          shards: of the feed of `count` batches, see `Feed.send`.
          count: the number of steps.
        """
        feed, leaves = self.feed(count), tree.flatten(self.state)
        loop = train_loop(
            self._steps.train_function(self._batch_specs),
            self._steps.state_specs(),
            self._batch_specs,
            self._steps.layout,
        )

        def program(handles: dict, batches: dict) -> dict:
            state = {path: variable.read(handles[path]) for path, variable in leaves.items()}
            outputs = loop({"state": tree.unflatten(state), "batches": feed.restored(batches)})
            values = tree.flatten(outputs["state"])
            for path, variable in leaves.items():
                variable.write(handles[path], values[path])
            return outputs["metrics"]

        return self._run(program, leaves, feed.join(shards))

    def build_evaluate(self, shards: dict[str, list[tf.Tensor]]) -> dict[str, tf.Tensor]:
        """Adds the program of `evaluate` to the graph; `shards` are of the feed of one batch."""
        feed, leaves = self.feed(1), tree.flatten(self.state["theta"])
        evaluate = self._steps.evaluate_function(self._batch_specs)

        def program(handles: dict, batches: dict) -> dict:
            theta = {path: variable.read(handles[path]) for path, variable in leaves.items()}
            batch = tree.map_leaves(lambda stacked: stacked[0], feed.restored(batches))
            return evaluate({"theta": tree.unflatten(theta), "batch": batch})["metrics"]

        return self._run(program, leaves, feed.join(shards))

    def build_diagnose(self, shards: dict[str, list[tf.Tensor]], step: tf.Tensor) -> dict[str, tf.Tensor]:
        """Adds the program of `diagnose` to the graph; results by path. `shards` are of the feed of one batch."""
        parts = {name: self.state[name] for name in DIAGNOSED if name in self.state and name != "step"}
        feed, leaves = self.feed(1), tree.flatten(parts)
        diagnose = self._steps.diagnose_function(self._batch_specs)

        def program(handles: dict, arguments: tuple[dict, tf.Tensor]) -> dict:
            batches, step = arguments
            state = {path: variable.read(handles[path]) for path, variable in leaves.items()}
            batch = tree.map_leaves(lambda stacked: stacked[0], feed.restored(batches))
            return tree.flatten(diagnose({"state": {**tree.unflatten(state), "step": step}, "batch": batch}))

        return self._run(program, leaves, (feed.join(shards), step))

    def _variable(self, path: str, spec: Spec) -> ShardedVariable:
        sharding = TensorSharding(spec, self._steps.layout)
        sharding.check(path)
        return ShardedVariable(sharding, self._engine.devices, path)

    def _on_first_host(self) -> contextlib.AbstractContextManager:
        """Places operations on the first host, from which TensorFlow dispatches a program to all cores."""
        return tf.device(self._engine.hosts[0])

    def _run(self, program: Callable, leaves: dict[str, ShardedVariable], argument: Any) -> Any:
        """Runs `program(handles, argument)` on all cores; handles are made outside of it, where the variables are."""
        handles = {path: variable.handle() for path, variable in leaves.items()}

        @tf.autograph.experimental.do_not_convert
        def replica(argument):
            outputs = program(handles, argument)
            return outputs and {name: spmd.replicate(value) for name, value in outputs.items()}

        with spmd.annotating_for(len(self._engine.devices)):
            return self._engine.strategy.run(replica, args=(argument,))


def _assign(variables: dict, values: Mapping[str, Any]):
    """Assigns a tree of values to the `ShardedVariable`s of the same paths; raises UserError if they differ."""
    leaves, own = tree.flatten(values), tree.flatten(variables)
    if leaves.keys() != own.keys():
        differing = ", ".join(sorted(leaves.keys() ^ own.keys())[:6])
        raise UserError(f"the state belongs to another model; they differ in {differing}.")
    for path, variable in own.items():
        variable.load(leaves[path])


class Feed:
    """Feeds stacked batches to the cores: each host receives the rows of its own cores only."""

    def __init__(self, engine: Engine, batch_specs: dict, layout: Layout, count: int):
        self._hosts = list(dict.fromkeys(engine.hosts))
        self._host_of = engine.hosts
        self._shardings = {
            path: TensorSharding(Spec((count, *spec.shape), spec.dtype, "r" + spec.logical_axes), layout)
            for path, spec in tree.flatten(batch_specs).items()
        }
        for path, sharding in self._shardings.items():
            sharding.check(f"batch {path}")

    def send(self, batches: Sequence[dict]) -> dict[str, list[tf.Tensor]]:
        """Copies batches to the hosts; returns by path, for each host, its shards `[cores of the host, steps, ...]`."""
        leaves = [tree.flatten(batch) for batch in batches]
        fed = {}
        for path, sharding in self._shardings.items():
            stacked, slices = np.stack([leaf[path] for leaf in leaves]), sharding.slices()
            fed[path] = []
            for host in self._hosts:
                shards = [
                    stacked[slices[shard]].reshape(sharding.shard_shape) for shard in self._shards_of(host, sharding)
                ]
                with tf.device(host):
                    fed[path].append(tf.constant(np.stack(shards)))
        return fed

    def specs(self) -> dict[str, list[tf.TensorSpec]]:
        """Returns the specs of what `send` returns."""
        return {
            path: [
                tf.TensorSpec((len(self._shards_of(host, sharding)), *sharding.shard_shape), sharding.spec.dtype)
                for host in self._hosts
            ]
            for path, sharding in self._shardings.items()
        }

    def join(self, shards: dict[str, list[tf.Tensor]]) -> dict[str, tf.Tensor]:
        """Joins what `send` returned into one tensor a path, as the input of a TPU program."""
        joined = {}
        for path, sharding in self._shardings.items():
            by_shard: dict[int, tf.Tensor] = {}
            for host, of_host in zip(self._hosts, shards[path], strict=True):
                with tf.device(host):
                    by_shard.update(zip(self._shards_of(host, sharding), tf.unstack(of_host), strict=True))
            joined[path] = sharding.join([by_shard[shard] for shard in range(len(by_shard))])
        return joined

    def restored(self, batches: dict[str, tf.Tensor]) -> dict:
        """Returns, inside the program, the tree of sharded batches `[steps, ...]`."""
        return tree.unflatten({path: self._shardings[path].restored(tensor) for path, tensor in batches.items()})

    def _shards_of(self, host: str, sharding: TensorSharding) -> list[int]:
        return [shard for shard, core in enumerate(sharding.cores) if self._host_of[core] == host]


def train_loop(
    train: Callable[[dict], dict], state_specs: dict, batch_specs: dict, layout: Layout
) -> Callable[[dict], dict]:
    """Turns a step into a loop of steps, `{state, batches} -> {state, metrics}`.

    Args:
      train: one step, `{state, batch} -> {state, metrics}`.
      state_specs: the tree of `Spec`s of the state.
      batch_specs: the tree of `Spec`s of a batch.
      layout: how both are sharded.

    Returns:
      A pure function. Its batches have a leading dimension of steps; its metrics are those of the last step.
    """
    specs = tree.flatten({"state": state_specs, "batch": batch_specs})
    step, outputs_of = _traced(train, specs, layout)

    def loop(inputs: dict) -> dict:
        state, batches = tree.flatten({"state": inputs["state"]}), tree.flatten({"batch": inputs["batches"]})
        count = next(iter(batches.values())).shape[0]

        def body(index: tf.Tensor, state: dict, metrics: dict) -> tuple:
            inputs = {path: layout.annotate(value, specs[path].logical_axes) for path, value in state.items()}
            inputs |= {path: stacked[index] for path, stacked in batches.items()}
            outputs = outputs_of(step(*(inputs[path] for path in specs)))
            return (
                index + 1,
                {path: layout.annotate(outputs[path], specs[path].logical_axes) for path in state},
                {path: outputs[path] for path in metrics},
            )

        metrics = {
            path: tf.zeros((), tensor.dtype)
            for path, tensor in outputs_of(step.outputs).items()
            if path.startswith("metrics/")
        }
        _, state, metrics = tf.while_loop(
            lambda index, *_: index < count, body, (tf.constant(0), state, metrics), maximum_iterations=count
        )
        return tree.unflatten({**state, **metrics})

    return loop


def _traced(function: Callable[[dict], dict], specs: dict[str, Spec], layout: Layout) -> tuple[Any, Callable]:
    """Returns a function as a graph, which takes a flat list of tensors, and a function that names its results."""
    paths: list[str] = []

    def train_step(*tensors):
        outputs = tree.flatten(function(tree.unflatten(dict(zip(specs, tensors, strict=True)))))
        paths[:] = outputs
        return list(outputs.values())

    with spmd.annotating_for(layout.mesh.size):
        traced = tf.function(train_step, autograph=False).get_concrete_function(
            *(tf.TensorSpec(spec.shape, spec.dtype) for spec in specs.values())
        )
    return traced, lambda results: dict(zip(paths, results, strict=True))


def _check_answers(tpu: str):
    """Raises UserError if nothing listens at a given address, for which TensorFlow would wait for ever."""
    if not tpu.startswith("grpc://"):
        return
    host, _, port = tpu.removeprefix("grpc://").rpartition(":")
    if not host or not port.isdecimal():
        raise UserError(f"--tpu={tpu}: expected grpc://HOST:PORT, for instance grpc://10.0.0.2:8470.")
    try:
        # The brackets are those of an IPv6 address.
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except (OSError, UnicodeError) as error:  # the latter for what can be no host's name, such as `..`
        raise UserError(
            f"--tpu={tpu}: nothing answers there ({error}); is the slice running, and this machine in its network?"
        ) from None


@contextlib.contextmanager
def _connection_errors(tpu: str) -> Iterator[None]:
    """Turns the many errors of finding and initialising a TPU into one that names the remedy."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, ImportError, tf.errors.OpError) as error:
        reason = str(error).strip().partition("\n")[0][:200]
        raise UserError(
            f"--tpu={tpu}: no TPU can be reached ({type(error).__name__}: {reason}). {_advice(tpu)}"
        ) from None


def _advice(tpu: str) -> str:
    try:
        importlib.metadata.version(TPU_TENSORFLOW.partition("==")[0])
    except importlib.metadata.PackageNotFoundError:
        return (
            f"The installed TensorFlow has no TPU support; on a Cloud TPU virtual machine install {TPU_TENSORFLOW} "
            f"(docs/cloud_tpu.md)."
        )
    if tpu == "local":
        return (
            "Is this the virtual machine of a slice with a single one? For a larger slice pass its name "
            "(docs/cloud_tpu.md)."
        )
    return "Is the slice running? On a slice with a single virtual machine pass --tpu=local (docs/cloud_tpu.md)."
