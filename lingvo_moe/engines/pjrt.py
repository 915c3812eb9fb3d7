"""The PJRT engine: runs programs on the devices that JAX finds, which are virtual CPU devices, GPUs or TPUs.

JAX serves as the PJRT runtime and nothing more. This module imports no TensorFlow.
"""

from __future__ import annotations

import contextlib
import logging
import numbers
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lingvo_moe import tree
from lingvo_moe.engines import compilation
from lingvo_moe.engines.base import StepPrograms
from lingvo_moe.errors import UserError, did_you_mean
from lingvo_moe.program import Argument, Program
from lingvo_moe.utils import allocator, cuda

_logger = logging.getLogger(__name__)


class Engine:
    """The protocol `base.Engine` on JAX devices.

    Attributes:
      devices: the JAX devices, as many as were asked for.
    """

    def __init__(
        self, num_devices: int, platform: str | None = None, all_accelerators: bool = False, processes: int = 1
    ):
        """Finds devices.

        Args:
          num_devices: how many. The CPU provides any number of virtual devices, unless JAX has started already.
          platform: `cpu`, `gpu` or `tpu`; None for what JAX prefers.
          all_accelerators: whether to take all GPUs or TPUs, if JAX prefers these, regardless of `num_devices`.
          processes: how many processes share the devices; each has equally many.

        Raises:
          UserError: the platform is absent, or has fewer devices, or the processes cannot share `num_devices` or have
            more; or `num_devices` is no number from 1.
        """
        if not isinstance(num_devices, numbers.Integral) or num_devices < 1:
            raise UserError(f"an engine of {num_devices!r} devices: expected a number from 1.")
        num_devices = int(num_devices)  # of NumPy's
        per_process = -(-num_devices // processes)
        available = _find_devices(per_process, platform)
        if all_accelerators and available[0].platform != "cpu":
            num_devices = len(available)
        elif num_devices % processes:
            raise UserError(
                f"{num_devices} devices cannot be divided among {processes} processes; "
                f"pass --devices={processes * per_process}, or another --processes."
            )
        if num_devices > len(available):
            kind = available[0].platform
            remedy = (
                "in Python, make the engine with the most devices before anything else starts JAX"
                if kind == "cpu"
                else "pass --platform=cpu for virtual ones"
            )
            raise UserError(
                f"--devices={num_devices}: there are {len(available)} {kind} devices; ask for at most that many, or "
                f"{remedy}."
            )
        if processes > 1 and num_devices < len(available):
            raise UserError(
                f"--devices={num_devices}: the {processes} processes have {len(available)} {available[0].platform} "
                f"devices; pass that many, because a process without a device has nothing to do."
            )
        self.devices = available[:num_devices]

    @property
    def platform(self) -> str:
        """`cpu`, `gpu` or `tpu`."""
        return self.devices[0].platform

    def compile(self, program: Program) -> Executable:
        """Compiles a program for these devices; raises UserError if it was made for another number of them."""
        if program.mesh.size != len(self.devices):
            raise UserError(
                f"program {program.name} is made for {program.mesh.size} devices ({program.mesh}); this engine "
                f"has {len(self.devices)}. Pass --devices={program.mesh.size}, or lower it for this mesh."
            )
        return Executable(program, Mesh(np.array(self.devices).reshape(program.mesh.shape), program.mesh.axis_names))

    def training(self, steps: StepPrograms, batch_specs: dict, evaluates: bool = True) -> Training:
        """Compiles a model's training step, and its validation loss if `evaluates`; raises UserError as `compile`."""
        return Training(self, steps, batch_specs, evaluates)

    def evaluation(self, steps: StepPrograms, batch_specs: dict) -> Evaluation:
        """Compiles a model's loss; raises UserError as `compile` does."""
        return Evaluation(self.compile(steps.evaluate(batch_specs)))

    def decoding(self, steps: StepPrograms, source_specs: dict, search: Any) -> Decoding:
        """Compiles a model's beam search; raises UserError as `compile` does."""
        if len(self.devices) > 1:
            return Decoding(self.compile(steps.decode(source_specs, search)))
        return Decoding(
            self.compile(steps.decode_prepared(source_specs, search)), self.compile(steps.prepare_decoding())
        )


class Training:
    """The protocol `base.Training`.

    Attributes:
      state: the tree of the training state, sharded; empty until `initialise` or `load`. A step consumes it.
      rows: the rows of a batch that devices of this process hold.
    """

    def __init__(self, engine: Engine, steps: StepPrograms, batch_specs: dict, evaluates: bool):
        self._engine, self._steps, self._batch_specs = engine, steps, batch_specs
        self._train = engine.compile(steps.train(batch_specs))
        self._evaluate = engine.compile(steps.evaluate(batch_specs)) if evaluates else None
        self._batch_size = next(iter(tree.flatten(batch_specs).values())).shape[0]
        self.rows = _local_rows(self._train.shardings("batch"), self._batch_size)
        self.state: dict = {}

    @property
    def shardings(self) -> dict:
        """The shardings of the state, for a checkpoint to be restored to."""
        return self._train.shardings("state")

    def initialise(self, seed: int):
        """Creates the state; each device initialises its own shards."""
        self.load(self._engine.compile(self._steps.init())({"seed": np.array([0, seed], np.int32)})["state"])

    def load(self, state: dict):
        """Takes over a state."""
        self.state = state

    def load_weights(self, theta: dict):
        """Replaces the weights of the state."""
        self.state = {**self.state, "theta": theta}

    def set_weight(self, path: str, value: np.ndarray):
        """Replaces one weight; each device takes its own shard.

        Raises:
          UserError: there is no such weight, or it has another shape; or no state yet.
        """
        self._require_state()
        flat = tree.flatten(self.state["theta"])
        if path not in flat:
            raise UserError(f"the model has no weight {path}.{did_you_mean(path, flat)}")
        old = flat[path]
        if value.shape != old.shape:
            raise UserError(f"the value of {path} has shape {list(value.shape)}, the weight {list(old.shape)}.")
        flat[path] = jax.make_array_from_callback(
            old.shape, old.sharding, lambda index: value[index].astype(old.dtype, copy=False)
        )
        self.load_weights(tree.unflatten(flat))

    def train(self, batches: Sequence[dict]) -> dict[str, jax.Array]:
        """Runs one step for each batch, of which it takes this process's `rows`; returns the metrics of the last.

        Raises:
          UserError: there is no state yet.
        """
        self._require_state()
        metrics: dict[str, jax.Array] = {}
        for batch in batches:
            outputs = self._train({"state": self.state, "batch": self._shard_rows(batch)})
            self.state, metrics = outputs["state"], outputs["metrics"]
        return metrics

    def evaluate(self, batch: dict) -> dict[str, jax.Array]:
        """Returns the metrics of one batch.

        Raises:
          UserError: `Engine.training` was called with `evaluates=False`, or there is no state yet.
        """
        if self._evaluate is None:
            raise UserError("this training does not evaluate; call Engine.training with evaluates=True.")
        self._require_state()
        return self._evaluate({"theta": self.state["theta"], "batch": batch})["metrics"]

    def diagnose(self, batch: dict, step: int) -> dict:
        """Compiles and runs `steps.diagnose_function` for the step after `step` steps, with the current weights."""
        program = self._engine.compile(self._steps.diagnose(self._batch_specs))
        state = {name: self.state[name] for name in program.shardings("state")} | {"step": np.int32(step)}
        return program({"state": state, "batch": self._shard_rows(batch)})

    def _require_state(self):
        if not self.state:
            raise UserError("there is no training state yet; call initialise(seed) or load(state) first.")

    def _shard_rows(self, batch: dict) -> dict:
        """Makes sharded batches of this process's rows; the other processes contribute theirs."""
        if len(self.rows) == self._batch_size:
            return batch

        def shard_rows(rows: np.ndarray, sharding: NamedSharding) -> jax.Array:
            def shard(index: Any) -> np.ndarray:
                start, stop, _ = index[0].indices(self._batch_size)
                return rows[start - self.rows.start : stop - self.rows.start, *index[1:]]

            return jax.make_array_from_callback((self._batch_size, *rows.shape[1:]), sharding, shard)

        return tree.map_leaves(shard_rows, batch, self._train.shardings("batch"))


class _Inference:
    """A program of weights, which stay loaded, and of one batch.

    Attributes:
      shardings: the tree of shardings of the weights.
    """

    def __init__(self, executable: Executable):
        self._executable = executable
        self._theta: dict = {}
        self.shardings = executable.shardings("theta")

    def load(self, theta: dict):
        """Takes over weights."""
        self._theta = theta


class Evaluation(_Inference):
    """A model's loss."""

    def evaluate(self, batch: dict) -> dict[str, jax.Array]:
        """Returns the metrics of one batch."""
        return self._executable({"theta": self._theta, "batch": batch})["metrics"]


class Decoding(_Inference):
    """A model's beam search."""

    def __init__(self, search: Executable, prepare: Executable | None = None):
        """Takes the program of a search and, if that takes prepared weights, the program that prepares them."""
        super().__init__(search)
        self._prepare = prepare
        if prepare:
            self.shardings = prepare.shardings("theta")

    def load(self, theta: dict):
        """Takes over weights, and prepares them; a program that prepares them consumes some."""
        if self._prepare:
            theta = jax.block_until_ready(self._prepare({"theta": theta})["theta"])
            allocator.return_freed_memory()  # as much as the prepared weights
        super().load(theta)

    def decode(self, source: dict) -> dict[str, jax.Array]:
        """Returns `ids`, `scores` and `lengths` of the best hypotheses of each row."""
        return self._executable({"theta": self._theta, "source": source})


class Executable:
    """A compiled program: call it with the tree of inputs, get the tree of outputs."""

    def __init__(self, program: Program, mesh: Mesh):
        self.program = program
        self._in_shardings, _ = compilation.shardings(program, mesh)
        self._compiled = compilation.compile_program(program, mesh)

    def __call__(self, inputs: Mapping[str, Any]) -> dict:
        """Runs the program.

        Args:
          inputs: a tree with the program's paths, of numpy arrays or of arrays that a program returned. Donated ones
            are consumed.

        Returns:
          A tree of sharded arrays; `numpy.asarray` copies one to the host.

        Raises:
          UserError: the weights are in int8, as a file may have them.
          ValueError: other inputs are not those of the program.
        """
        leaves = tree.flatten(inputs)
        expected = [a.path for a in self.program.inputs]
        self._check_not_int8(leaves)
        if list(leaves) != expected:
            missing, unknown = sorted(set(expected) - set(leaves)), sorted(set(leaves) - set(expected))
            raise ValueError(
                f"program {self.program.name}: the inputs differ from those of its specs; missing: {_listed(missing)}; "
                f"unknown: {_listed(unknown)}."
            )
        arguments = [self._shard_input(a, leaves[a.path], s) for a, s in zip(self.program.inputs, self._in_shardings)]
        outputs = self._compiled(*arguments)
        return tree.unflatten({a.path: value for a, value in zip(self.program.outputs, outputs)})

    def shardings(self, path: str) -> dict:
        """Returns the tree of shardings of the inputs below `path`, for a checkpoint to be restored to."""
        return _below(path, self.program.inputs, self._in_shardings)

    def hlo(self) -> str:
        """Returns the text of the compiled, partitioned module."""
        return self._compiled.as_text() or ""

    def memory(self):
        """Returns the compiler's account of memory per device: arguments, outputs, aliased and temporary bytes."""
        return self._compiled.memory_analysis()

    def _check_not_int8(self, leaves: Mapping[str, Any]):
        """Raises UserError for a float32 input in int8: `checkpoint convert` writes weights so, beside their scales."""
        for argument in self.program.inputs:
            if argument.dtype == "float32" and getattr(leaves.get(argument.path), "dtype", None) == np.int8:
                raise UserError(
                    f"program {self.program.name}: {argument.path} is int8, expected float32: the file has weights in "
                    "int8 and their scales beside them. Make one in float32: `python -m lingvo_moe checkpoint convert "
                    "--input=FILE --logdir=NEW`, then `checkpoint convert --logdir=NEW --output=NEW.safetensors "
                    "--dtype=float32`."
                )

    def _shard_input(self, argument: Argument, value: Any, sharding: NamedSharding) -> jax.Array:
        array = value if isinstance(value, jax.Array) else np.asarray(value)
        if array.shape != argument.shape or array.dtype != np.dtype(argument.dtype):
            raise ValueError(
                f"program {self.program.name}: {argument.path} is {array.dtype}{list(array.shape)}; expected "
                f"{argument.dtype}{list(argument.shape)}."
            )
        if isinstance(array, jax.Array) and array.sharding == sharding:
            return array
        if sharding.is_fully_addressable:
            return jax.device_put(array, sharding)
        # Every process has the same array; device_put would compare them.
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def _listed(paths: list[str]) -> str:
    return ", ".join([*paths[:6], *(["..."] if len(paths) > 6 else [])]) or "none"


def request_cpu_devices(number: int):
    """Makes JAX start with this number of virtual CPU devices; without effect once it has started."""
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", number)


def _find_devices(num_cpu_devices: int, platform: str | None) -> list:
    request_cpu_devices(num_cpu_devices)  # the caller checks whether they are enough
    try:
        devices = jax.devices(platform)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        if platform is None:
            raise UserError(
                f"the environment variable JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS')}: {reason}"
            ) from None
        remedy = (
            f" CUDA for JAX is not installed: {cuda.remedy()}." if platform == "gpu" and not cuda.has_runtime() else ""
        )
        raise UserError(f"--platform={platform}: JAX finds no such device ({reason}).{remedy}") from None
    if platform is None and cuda.has_unusable_gpu():
        _logger.warning(
            "the GPU of this machine is not used, because CUDA for JAX is not installed: %s.", cuda.remedy()
        )
    return devices


def _below(path: str, arguments: tuple[Argument, ...], shardings: tuple[NamedSharding, ...]) -> dict:
    prefix = f"{path}/"
    return tree.unflatten(
        {
            a.path.removeprefix(prefix): sharding
            for a, sharding in zip(arguments, shardings)
            if a.path.startswith(prefix)
        }
    )


def _local_rows(shardings: dict, batch_size: int) -> range:
    """Returns the rows of a batch that devices of this process hold; raises UserError if they are not consecutive."""
    sharding = next(iter(tree.flatten(shardings).values()))
    rows = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]))
    indices: Any = rows.addressable_devices_indices_map((batch_size,)).values()
    bounds = {rows_of_device.indices(batch_size)[:2] for (rows_of_device,) in indices}
    local = range(min(start for start, _ in bounds), max(stop for _, stop in bounds))
    if sum(stop - start for start, stop in bounds) != len(local):
        raise UserError(
            f"the devices of process {jax.process_index()} do not hold consecutive rows of a batch; pass a --mesh "
            f"in which the devices of a process are neighbours along the axis that shards the batch."
        )
    return local
