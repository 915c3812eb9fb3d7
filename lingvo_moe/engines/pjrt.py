"""The PJRT engine: runs programs on the devices that JAX finds, which are virtual CPU devices, GPUs or TPUs.

JAX serves as the PJRT runtime and nothing more. This module imports no TensorFlow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import numbers
import os
import pathlib
import platform as machine
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import core, export
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lingvo_moe import tree
from lingvo_moe.engines.base import StepPrograms
from lingvo_moe.errors import UserError, did_you_mean
from lingvo_moe.program import COMPILER_DEFAULT, Argument, Program
from lingvo_moe.utils import cuda, processor
from lingvo_moe.utils.hashes import sha256

_logger = logging.getLogger(__name__)
_SHARDING_CALLS = ("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape")
# libtpu's option for products in slices. On TPU v2 and v3, CollectivePermutes are synchronous without the second one,
# so that no slice would arrive during a product.
_WINDOWED_EINSUM = "xla_jf_spmd_threshold_for_windowed_einsum_mib"
_ASYNCHRONOUS_PERMUTES = {"xla_enable_async_collective_permute": "true"}


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

    def load(self, program: Program) -> Executable:
        """Compiles a program for these devices; raises UserError if it was made for another number of them."""
        if program.mesh.size != len(self.devices):
            raise UserError(
                f"program {program.name} is made for {program.mesh.size} devices ({program.mesh}); this engine "
                f"has {len(self.devices)}. Pass --devices={program.mesh.size}, or lower it for this mesh."
            )
        return Executable(program, Mesh(np.array(self.devices).reshape(program.mesh.shape), program.mesh.axis_names))

    def training(self, steps: StepPrograms, batch_specs: dict, evaluates: bool = True) -> Training:
        """Compiles a model's training step, and its held-out loss if `evaluates`; raises UserError as `load` does."""
        return Training(self, steps, batch_specs, evaluates)

    def evaluation(self, steps: StepPrograms, batch_specs: dict) -> Evaluation:
        """Compiles a model's loss; raises UserError as `load` does."""
        return Evaluation(self.load(steps.evaluate(batch_specs)))

    def decoding(self, steps: StepPrograms, source_specs: dict, search: Any) -> Decoding:
        """Compiles a model's beam search; raises UserError as `load` does."""
        if len(self.devices) > 1:
            return Decoding(self.load(steps.decode(source_specs, search)))
        return Decoding(self.load(steps.decode_prepared(source_specs, search)), self.load(steps.prepare_decoding()))


class Training:
    """The protocol `base.Training`.

    Attributes:
      state: the tree of the training state, sharded; empty until `initialise` or `load`. A step consumes it.
      rows: the rows of a batch that devices of this process hold.
    """

    def __init__(self, engine: Engine, steps: StepPrograms, batch_specs: dict, evaluates: bool):
        self._engine, self._steps, self._batch_specs = engine, steps, batch_specs
        self._train = engine.load(steps.train(batch_specs))
        self._evaluate = engine.load(steps.evaluate(batch_specs)) if evaluates else None
        self._batch_size = next(iter(tree.flatten(batch_specs).values())).shape[0]
        self.rows = _local_rows(self._train.shardings("batch"), self._batch_size)
        self.state: dict = {}

    @property
    def shardings(self) -> dict:
        """The shardings of the state, for a checkpoint to be restored to."""
        return self._train.shardings("state")

    def initialise(self, seed: int):
        """Creates the state; each device initialises its own shards."""
        self.load(self._engine.load(self._steps.init())({"seed": np.array([0, seed], np.int32)})["state"])

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
        program = self._engine.load(self._steps.diagnose(self._batch_specs))
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
        """Takes over weights, and prepares them."""
        super().load(self._prepare({"theta": theta})["theta"] if self._prepare else theta)

    def decode(self, source: dict) -> dict[str, jax.Array]:
        """Returns `ids`, `scores` and `lengths` of the best hypotheses of each row."""
        return self._executable({"theta": self._theta, "source": source})


class Executable:
    """A compiled program: call it with the tree of inputs, get the tree of outputs."""

    def __init__(self, program: Program, mesh: Mesh):
        self.program = program
        self._in_shardings, _ = _shardings(program, mesh)
        self._compiled = compile_program(program, mesh)

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
                f"program {self.program.name}: its inputs are other ones; missing: {_listed(missing)}; unknown: "
                f"{_listed(unknown)}."
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


def use_compilation_cache(directory: pathlib.Path):
    """Makes JAX cache the executables of this process in a subdirectory of `directory`.

    Each kind of machine has its own, because several may share a home directory and an executable for a CPU uses all
    instructions that it has. So has each number of cores: XLA divides work among threads when it compiles, and with
    another division sums have other last bits.
    """
    kind = [processor.description().get(field, "") for field in ("model name", "flags", "Features", "CPU part")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    described = "\n".join([machine.machine(), machine.system(), f"{cores} cores", *kind])
    name = sha256(described)[:16]
    jax.config.update("jax_compilation_cache_dir", str(directory / name))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def compile_program(
    program: Program, mesh: Mesh, options: Mapping[str, str | bool] | None = None
) -> jax.stages.Compiled:
    """Partitions and compiles a program for the devices of `mesh`, which need not exist here (see `topology`).

    Args:
      program: lowered for a mesh of this size.
      mesh: of JAX's devices.
      options: of the platform's compiler.

    Raises:
      UserError: a mesh axis does not divide a dimension that it shards, or the program asks for products in slices,
        which the platform's compiler does not make.
    """
    _check_divisible(program, mesh)
    windowed = _windowed_einsum_options(program, mesh.devices.flat[0].platform)
    donated = tuple(i for i, a in enumerate(program.inputs) if a.path in program.donated)
    call = exported(program).call
    in_shardings, out_shardings = _shardings(program, mesh)
    jitted = jax.jit(call, in_shardings=in_shardings, donate_argnums=donated, out_shardings=out_shardings)
    lowered = jitted.lower(*(jax.ShapeDtypeStruct(a.shape, np.dtype(a.dtype)) for a in program.inputs))
    return lowered.compile(compiler_options={**windowed, **(options or {})})


def _windowed_einsum_options(program: Program, platform: str) -> dict[str, str]:
    if program.windowed_einsum_mib == COMPILER_DEFAULT:
        return {}
    if platform != "tpu":
        # XLA has options for GPUs, which change nothing in jaxlib 0.10.2 (docs/operators.md), and none for CPUs.
        raise UserError(
            f"program {program.name} has windowed_einsum_mib={program.windowed_einsum_mib}: XLA multiplies in slices "
            f"for TPUs alone, and this is a {platform}. Use --set windowed_einsum_mib={COMPILER_DEFAULT}."
        )
    return {_WINDOWED_EINSUM: str(program.windowed_einsum_mib), **_ASYNCHRONOUS_PERMUTES}


def exported(program: Program) -> export.Exported:
    """Returns the program as if JAX had exported it for one device.

    JAX's own file format would need one more package, and holds nothing but the module.
    """

    def avals(arguments):
        return tuple(core.ShapedArray(a.shape, np.dtype(a.dtype)) for a in arguments)

    def tree_of(arguments):
        return jax.tree_util.tree_structure(arguments)

    inputs, outputs = avals(program.inputs), avals(program.outputs)
    allow = export.DisabledSafetyCheck
    # JAX 0.11 has no such field any more: there, all modules are as if it were True.
    fields = {field.name for field in dataclasses.fields(export.Exported)}
    older: dict[str, Any] = {"_has_named_shardings": True} if "_has_named_shardings" in fields else {}
    return export.Exported(
        fun_name=program.name,
        in_tree=tree_of((inputs, {})),
        in_avals=inputs,
        out_tree=tree_of(outputs),
        out_avals=outputs,
        **older,
        _in_named_shardings=(None,) * len(inputs),
        _out_named_shardings=(None,) * len(outputs),
        in_shardings_hlo=(None,) * len(inputs),
        out_shardings_hlo=(None,) * len(outputs),
        nr_devices=1,
        platforms=("cpu",),
        ordered_effects=(),
        unordered_effects=(),
        # The module is the same for every platform: TensorFlow lowered it for none in particular.
        disabled_safety_checks=(allow.platform(), *(allow.custom_call(call) for call in _SHARDING_CALLS)),
        mlir_module_serialized=program.module,
        calling_convention_version=export.maximum_supported_calling_convention_version,
        module_kept_var_idx=tuple(range(len(inputs))),
        uses_global_constants=False,
        _get_vjp=None,
    )


def _shardings(program: Program, mesh: Mesh) -> tuple[tuple[NamedSharding, ...], tuple[NamedSharding, ...]]:
    """Returns the shardings of a program's inputs and outputs on `mesh`."""
    inputs, outputs = (
        tuple(_named_sharding(mesh, a) for a in arguments) for arguments in (program.inputs, program.outputs)
    )
    return inputs, outputs


def request_cpu_devices(number: int):
    """Makes JAX start with this number of virtual CPU devices; without effect once it has started."""
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", number)


def _find_devices(num_cpu_devices: int, platform: str | None) -> list:
    request_cpu_devices(num_cpu_devices)  # the caller checks whether they are enough
    try:
        devices = jax.devices(platform)
    except RuntimeError as error:
        remedy = (
            f" CUDA for JAX is not installed: {cuda.remedy()}." if platform == "gpu" and not cuda.has_runtime() else ""
        )
        raise UserError(
            f"--platform={platform}: JAX finds no such device ({str(error).splitlines()[0]}).{remedy}"
        ) from None
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


def _named_sharding(mesh: Mesh, argument: Argument) -> NamedSharding:
    axes = [None if axis < 0 else mesh.axis_names[axis] for axis in argument.dims_mapping]
    return NamedSharding(mesh, PartitionSpec(*axes))


def _check_divisible(program: Program, mesh: Mesh):
    sizes = tuple(mesh.shape.values())
    for argument in (*program.inputs, *program.outputs):
        for size, axis in zip(argument.shape, argument.dims_mapping):
            if axis >= 0 and size % sizes[axis]:
                nearest = math.gcd(size, sizes[axis])
                raise UserError(
                    f"program {program.name}: {argument.path} {list(argument.shape)} has a dimension of {size}, "
                    f"which mesh axis {mesh.axis_names[axis]} of {sizes[axis]} devices does not divide. Use a "
                    f"number of devices that divides it (for instance {nearest}), or change the size."
                )
