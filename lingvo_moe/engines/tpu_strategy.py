"""The TPUStrategy engine: trains on a Cloud TPU slice through TensorFlow's own runtime.

All cores are one replica, whose program XLA's SPMD partitioner cuts by the annotations that the step functions carry: those of
the PJRT engine's programs, letter by letter. A call makes many steps in one loop on the device. No JAX is involved.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from lingvo_moe import tree
from lingvo_moe.engines.base import StepFunctions
from lingvo_moe.engines.tpu_strategy_variables import Placement, ShardedVariable
from lingvo_moe.errors import UserError
from lingvo_moe.lazy import tf
from lingvo_moe.program import Program
from lingvo_moe.sharding import spmd
from lingvo_moe.sharding.layout import Layout, Spec

# The newest TensorFlow that is built for Cloud TPU virtual machines.
TPU_TENSORFLOW = "tensorflow-tpu==2.20.0"
_SECONDS_TO_ANSWER = 10.0


class Engine:
    """A TPU slice, all of its cores one replica.

    Attributes:
      strategy: the `tf.distribute.TPUStrategy`.
      devices: of all cores, TensorFlow's names, by their number in the mesh.
      hosts: of each core, the device of the host that it is attached to.
    """

    platform = "tpu"

    def __init__(self, resolver, topology):
        """Takes a slice that has been initialised.

        Args:
          resolver: the `tf.distribute.cluster_resolver.TPUClusterResolver`.
          topology: what initialising it returned.
        """
        assignment = tf.tpu.experimental.DeviceAssignment.build(
            topology, computation_shape=list(topology.mesh_shape), num_replicas=1
        )
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
          tpu: `local` on the virtual machine of a slice with one; the slice's name, or `grpc://HOST:PORT` of its first
            machine, for larger ones.

        Raises:
          UserError: no TPU can be reached, or TensorFlow has no support for it.
        """
        if not tpu:
            raise UserError("--tpu is missing: the name of the slice, or local on a virtual machine that has it all.")
        _check_answers(tpu)
        with _telling_what_is_missing(tpu):
            resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=tpu)
            # Batches and curves are made here, where their files are; only what `Training` runs is for the slice.
            tf.config.experimental_connect_to_cluster(resolver, make_master_device_default=False)
            return Engine(resolver, tf.tpu.experimental.initialize_tpu_system(resolver))

    def training(self, steps: StepFunctions, batch_specs: dict, evaluates: bool = True) -> Training:
        """Makes room for a model's state; a program is made when it is first run, `evaluate`'s only where it ever is.

        Raises:
          UserError: the mesh has not as many devices as the slice has cores, or does not divide what it cuts.
        """
        return Training(self, steps, batch_specs)

    def load(self, program: Program) -> NoReturn:
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
    """A model's state on a slice, and what is done with it.

    Attributes:
      state: the tree of the training state, as checkpoints have it; its leaves are `ShardedVariable`s, empty until
        `initialise` or `load`.
      shardings: None: a checkpoint is restored as what `ShardedVariable.load` reads part by part.
      rows: of a batch, those that this process feeds: all.
    """

    shardings = None

    def __init__(self, engine: Engine, steps: StepFunctions, batch_specs: dict):
        """Makes room for the state; raises as `Engine.training`."""
        if steps.layout.mesh.size != len(engine.devices):
            raise UserError(
                f"the slice has {len(engine.devices)} cores, the mesh is {steps.layout.mesh}; pass "
                f"--mesh={len(engine.devices)}, or a slice of {steps.layout.mesh.size} cores."
            )
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
        """Creates the state where it stays, each core its own part."""
        with self._on_first_host():
            self._initialise(tf.constant([0, seed], tf.int32))

    def load(self, state: Mapping[str, Any]):
        """Takes over a state, part by part: a tree like `state` of arrays, or of what `ShardedVariable.load` reads from.

        Raises:
          UserError: a tree with other paths or shapes.
        """
        leaves, own = tree.flatten(state), tree.flatten(self.state)
        if leaves.keys() != own.keys():
            differing = ", ".join(sorted(leaves.keys() ^ own.keys())[:6])
            raise UserError(f"the state is of another model; it differs in {differing}.")
        for path, variable in own.items():
            variable.load(leaves[path])

    def train(self, batches: Sequence[dict]) -> dict[str, tf.Tensor]:
        """Makes one step for each batch, all in one loop on the device; another number of them compiles another loop.

        Returns:
          The metrics of the last step; reading one waits for the loop.
        """
        parts = self.feed(len(batches)).place(batches)
        with self._on_first_host():
            return self._train(parts, len(batches))

    def evaluate(self, batch: dict) -> dict[str, tf.Tensor]:
        """The metrics of one batch."""
        parts = self.feed(1).place([batch])
        with self._on_first_host():
            return self._evaluate(parts)

    def diagnose(self, batch: dict, step: int) -> dict:
        """What `steps.diagnose_function` tells of a training step from these weights after `step` steps."""
        parts = self.feed(1).place([batch])
        with self._on_first_host():
            return tree.unflatten(self._diagnose(parts, tf.constant(step)))

    def feed(self, count: int) -> Feed:
        """How `count` batches reach the cores."""
        return Feed(self._engine, self._batch_specs, self._steps.layout, count)

    def build_initialise(self, seed: tf.Tensor):
        """Adds the program of `initialise` to the graph."""
        leaves = tree.flatten(self.state)

        def program(handles: dict, seed: tf.Tensor):
            values = tree.flatten(self._steps.init_function({"seed": seed})["state"])
            for path, variable in leaves.items():
                variable.write(handles[path], values[path])

        self._run(program, leaves, seed)

    def build_train(self, parts: dict[str, list[tf.Tensor]], count: int) -> dict[str, tf.Tensor]:
        """Adds the program of `train` to the graph.

        Args:
          parts: of the feed of `count` batches, see `Feed.place`.
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

        return self._run(program, leaves, feed.join(parts))

    def build_evaluate(self, parts: dict[str, list[tf.Tensor]]) -> dict[str, tf.Tensor]:
        """Adds the program of `evaluate` to the graph; `parts` are of the feed of one batch."""
        feed, leaves = self.feed(1), tree.flatten(self.state["theta"])
        evaluate = self._steps.evaluate_function(self._batch_specs)

        def program(handles: dict, batches: dict) -> dict:
            theta = {path: variable.read(handles[path]) for path, variable in leaves.items()}
            batch = tree.map_leaves(lambda stacked: stacked[0], feed.restored(batches))
            return evaluate({"theta": tree.unflatten(theta), "batch": batch})["metrics"]

        return self._run(program, leaves, feed.join(parts))

    def build_diagnose(self, parts: dict[str, list[tf.Tensor]], step: tf.Tensor) -> dict[str, tf.Tensor]:
        """Adds the program of `diagnose` to the graph; results by path. `parts` are of the feed of one batch."""
        feed, leaves = self.feed(1), tree.flatten({name: self.state[name] for name in ("seed", "theta")})
        diagnose = self._steps.diagnose_function(self._batch_specs)

        def program(handles: dict, arguments: tuple[dict, tf.Tensor]) -> dict:
            batches, step = arguments
            state = {path: variable.read(handles[path]) for path, variable in leaves.items()}
            batch = tree.map_leaves(lambda stacked: stacked[0], feed.restored(batches))
            return tree.flatten(diagnose({"state": {**tree.unflatten(state), "step": step}, "batch": batch}))

        return self._run(program, leaves, (feed.join(parts), step))

    def _variable(self, path: str, spec: Spec) -> ShardedVariable:
        placement = Placement(spec, self._steps.layout)
        placement.check(path)
        return ShardedVariable(placement, self._engine.devices, path)

    def _on_first_host(self) -> contextlib.AbstractContextManager:
        """From there TensorFlow hands a program on to all cores."""
        return tf.device(self._engine.hosts[0])

    def _run(self, program: Callable, leaves: dict[str, ShardedVariable], argument: Any) -> Any:
        """Runs `program(handles, argument)` on all cores at once; handles are made where the variables are, outside of it."""
        handles = {path: variable.handle() for path, variable in leaves.items()}

        @tf.autograph.experimental.do_not_convert
        def replica(argument):
            outputs = program(handles, argument)
            return outputs and {name: spmd.replicate(value) for name, value in outputs.items()}

        with spmd.num_devices(len(self._engine.devices)):
            return self._engine.strategy.run(replica, args=(argument,))


class Feed:
    """The way of stacked batches to the cores: a host is given the rows of its own cores, and no others."""

    def __init__(self, engine: Engine, batch_specs: dict, layout: Layout, count: int):
        self._hosts = list(dict.fromkeys(engine.hosts))
        self._host_of = engine.hosts
        self._placements = {
            path: Placement(Spec((count, *spec.shape), spec.dtype, "r" + spec.logical_axes), layout)
            for path, spec in tree.flatten(batch_specs).items()
        }
        for path, placement in self._placements.items():
            placement.check(f"batch {path}")

    def place(self, batches: Sequence[dict]) -> dict[str, list[tf.Tensor]]:
        """Puts batches onto the hosts: by path, for each host the parts `[cores of the host, steps, ...]`."""
        leaves = [tree.flatten(batch) for batch in batches]
        placed = {}
        for path, placement in self._placements.items():
            stacked, where = np.stack([leaf[path] for leaf in leaves]), placement.slices()
            placed[path] = []
            for host in self._hosts:
                parts = [stacked[where[part]].reshape(placement.part_shape) for part in self._parts_of(host, placement)]
                with tf.device(host):
                    placed[path].append(tf.constant(np.stack(parts)))
        return placed

    def specs(self) -> dict[str, list[tf.TensorSpec]]:
        """What `place` returns, without values."""
        return {
            path: [
                tf.TensorSpec((len(self._parts_of(host, placement)), *placement.part_shape), placement.spec.dtype)
                for host in self._hosts
            ]
            for path, placement in self._placements.items()
        }

    def join(self, parts: dict[str, list[tf.Tensor]]) -> dict[str, tf.Tensor]:
        """What `place` returned, one tensor a path, for a TPU program to be called with."""
        joined = {}
        for path, placement in self._placements.items():
            by_part: dict[int, tf.Tensor] = {}
            for host, of_host in zip(self._hosts, parts[path], strict=True):
                with tf.device(host):
                    by_part.update(zip(self._parts_of(host, placement), tf.unstack(of_host), strict=True))
            joined[path] = placement.join([by_part[part] for part in range(len(by_part))])
        return joined

    def restored(self, batches: dict[str, tf.Tensor]) -> dict:
        """In the program: the tree of batches `[steps, ...]`, in place."""
        return tree.unflatten({path: self._placements[path].restored(tensor) for path, tensor in batches.items()})

    def _parts_of(self, host: str, placement: Placement) -> list[int]:
        return [part for part, core in enumerate(placement.cores) if self._host_of[core] == host]


def train_loop(
    train: Callable[[dict], dict], state_specs: dict, batch_specs: dict, layout: Layout
) -> Callable[[dict], dict]:
    """Makes many steps one function, `{state, batches} -> {state, metrics}`.

    Args:
      train: one step, `{state, batch} -> {state, metrics}`.
      state_specs, batch_specs: trees of `Spec`s.
      layout: where state and batch lie.

    Returns:
      A pure function; its batches have a leading dimension of steps, its metrics are those of the last one.
    """
    specs = tree.flatten({"state": state_specs, "batch": batch_specs})
    step, outputs_of = _traced(train, specs, layout)

    def loop(inputs: dict) -> dict:
        state, batches = tree.flatten({"state": inputs["state"]}), tree.flatten({"batch": inputs["batches"]})
        count = next(iter(batches.values())).shape[0]

        def body(index: tf.Tensor, state: dict, metrics: dict) -> tuple:
            here = {path: layout.annotate(value, specs[path].logical_axes) for path, value in state.items()}
            here |= {path: stacked[index] for path, stacked in batches.items()}
            outputs = outputs_of(step(*(here[path] for path in specs)))
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
    """A function as a graph of its own, which takes a flat list of tensors, and what names its results by path."""
    paths: list[str] = []

    def train_step(*tensors):
        outputs = tree.flatten(function(tree.unflatten(dict(zip(specs, tensors, strict=True)))))
        paths[:] = outputs
        return list(outputs.values())

    with spmd.num_devices(layout.mesh.size):
        traced = tf.function(train_step, autograph=False).get_concrete_function(
            *(tf.TensorSpec(spec.shape, spec.dtype) for spec in specs.values())
        )
    return traced, lambda results: dict(zip(paths, results, strict=True))


def _check_answers(tpu: str):
    """Raises UserError where nothing listens at a given address, for which TensorFlow would wait without end."""
    if not tpu.startswith("grpc://"):
        return
    host, _, port = tpu.removeprefix("grpc://").rpartition(":")
    if not host or not port.isdecimal():
        raise UserError(f"--tpu={tpu}: expected grpc://HOST:PORT, for instance grpc://10.0.0.2:8470.")
    try:
        socket.create_connection((host, int(port)), _SECONDS_TO_ANSWER).close()
    except OSError as error:
        raise UserError(
            f"--tpu={tpu}: nothing answers there ({error}); is the slice running, and this machine in its network?"
        ) from None


@contextlib.contextmanager
def _telling_what_is_missing(tpu: str) -> Iterator[None]:
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
        return "Is this a virtual machine of a slice, and the only one? Of others pass the slice's name (docs/cloud_tpu.md)."
    return "Is the slice running? Of one with a single virtual machine pass --tpu=local (docs/cloud_tpu.md)."
