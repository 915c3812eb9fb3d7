"""The PJRT engine: runs programs on the devices that JAX finds: virtual CPU devices, GPUs or TPUs.

JAX is here the PJRT runtime and nothing more. This module imports no TensorFlow.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import pathlib
import platform as machine
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import export
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lingvo_moe import tree
from lingvo_moe.engines.base import StepPrograms
from lingvo_moe.errors import UserError
from lingvo_moe.program import Argument, Program

_SHARDING_CALLS = ("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape")


class Engine:
    """Devices to run programs on.

    Attributes:
      devices: the JAX devices, as many as were asked for.
    """

    def __init__(
        self, num_devices: int, platform: str | None = None, all_accelerators: bool = False, processes: int = 1
    ):
        """Finds devices.

        Args:
          num_devices: how many. On the CPU any number of virtual devices can be had, as long as JAX has not started yet.
          platform: `cpu`, `gpu` or `tpu`; None for whatever JAX prefers.
          all_accelerators: where JAX prefers GPUs or TPUs, take all of them, however many.
          processes: whose devices these are, all together, see `joined`; on the CPU each has as many as another.

        Raises:
          UserError: the platform is absent, or has fewer devices, or more in other processes.
        """
        if num_devices % processes:
            raise UserError(
                f"{num_devices} devices cannot be shared by {processes} processes, each having as many as another; "
                f"pass --devices={processes * -(-num_devices // processes)}, or another --processes."
            )
        found = _find_devices(num_devices // processes, platform)
        if all_accelerators and found[0].platform != "cpu":
            num_devices = len(found)
        if num_devices > len(found):
            raise UserError(
                f"--devices={num_devices}: there are {len(found)} {found[0].platform} devices; ask for at most that "
                f"many, or pass --platform=cpu for virtual ones."
            )
        if processes > 1 and num_devices < len(found):
            raise UserError(
                f"--devices={num_devices}: the {processes} processes have {len(found)} {found[0].platform} devices; "
                f"pass that many, a process without one has nothing to do."
            )
        self.devices = found[:num_devices]

    @property
    def platform(self) -> str:
        """`cpu`, `gpu` or `tpu`."""
        return self.devices[0].platform

    def load(self, program: Program) -> Executable:
        """Compiles a program for these devices; raises UserError where it was made for another number of them."""
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
        return Decoding(self.load(steps.decode(source_specs, search)))


class Training:
    """A model's state on the devices, and what is done with it.

    Attributes:
      state: the tree of the training state, distributed; empty until `initialise` or `load`. A step consumes it.
      rows: of a batch, those that devices of this process hold; all of them where it is alone.
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
        """Of the state, for a checkpoint to be restored to."""
        return self._train.shardings("state")

    def initialise(self, seed: int):
        """Creates the state where it stays, each device its own part."""
        self.load(self._engine.load(self._steps.init())({"seed": np.array([0, seed], np.int32)})["state"])

    def load(self, state: dict):
        """Takes over a state."""
        self.state = state

    def train(self, batches: Sequence[dict]) -> dict[str, jax.Array]:
        """Makes one step for each batch, of which a process is given its `rows`; returns the metrics of the last, of which
        reading one waits for it."""
        for batch in batches:
            outputs = self._train({"state": self.state, "batch": self._place_rows(batch)})
            self.state = outputs["state"]
        return outputs["metrics"]

    def evaluate(self, batch: dict) -> dict[str, jax.Array]:
        """The metrics of one batch."""
        return self._evaluate({"theta": self.state["theta"], "batch": batch})["metrics"]

    def diagnose(self, batch: dict, step: int) -> dict:
        """What `steps.diagnose_function` tells of a training step from these weights after `step` steps; compiles first."""
        program = self._engine.load(self._steps.diagnose(self._batch_specs))
        state = {"step": np.int32(step), "seed": self.state["seed"], "theta": self.state["theta"]}
        return program({"state": state, "batch": self._place_rows(batch)})

    def _place_rows(self, batch: dict) -> dict:
        """Puts the rows of this process where they belong; others put theirs there."""
        if len(self.rows) == self._batch_size:
            return batch

        def place(rows: np.ndarray, sharding: NamedSharding) -> jax.Array:
            def part(where: tuple[slice, ...]) -> np.ndarray:
                start, stop, _ = where[0].indices(self._batch_size)
                return rows[start - self.rows.start : stop - self.rows.start, *where[1:]]

            return jax.make_array_from_callback((self._batch_size, *rows.shape[1:]), sharding, part)

        return tree.map_leaves(place, batch, self._train.shardings("batch"))


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

    def decode(self, source: dict) -> dict[str, jax.Array]:
        """Returns `ids`, `scores` and `lengths` of the best hypotheses of each row."""
        return self._executable({"theta": self._theta, "source": source})


class Executable:
    """A compiled program: call it with the tree of inputs, get the tree of outputs."""

    def __init__(self, program: Program, mesh: Mesh):
        self.program = program
        self._in_shardings, self._out_shardings = _placements(program, mesh)
        self._compiled = compile_program(program, mesh)

    def __call__(self, inputs: Mapping[str, Any]) -> dict:
        """Runs the program.

        Args:
          inputs: a tree with the program's paths: numpy arrays, which are distributed, or arrays that a program returned.
            Donated ones are consumed.

        Returns:
          A tree of distributed arrays; `numpy.asarray` brings one here.
        """
        leaves = tree.flatten(inputs)
        expected = [a.path for a in self.program.inputs]
        if list(leaves) != expected:
            raise ValueError(
                f"program {self.program.name}: inputs differ from its own: {sorted(set(leaves) ^ set(expected))[:6]}."
            )
        placed = [self._place(a, leaves[a.path], s) for a, s in zip(self.program.inputs, self._in_shardings)]
        outputs = self._compiled(*placed)
        return tree.unflatten({a.path: value for a, value in zip(self.program.outputs, outputs)})

    def shardings(self, path: str) -> dict:
        """The tree of shardings of the inputs below `path`, for a checkpoint to be restored to."""
        return _below(path, self.program.inputs, self._in_shardings)

    def output_shardings(self, path: str) -> dict:
        """The same of the outputs below `path`."""
        return _below(path, self.program.outputs, self._out_shardings)

    def hlo(self) -> str:
        """The text of the compiled, partitioned module."""
        return self._compiled.as_text()

    def memory(self):
        """The compiler's account of memory per device: arguments, outputs, aliased and temporary bytes."""
        return self._compiled.memory_analysis()

    def _place(self, argument: Argument, value: Any, placement: NamedSharding):
        array = value if isinstance(value, jax.Array) else np.asarray(value)
        if array.shape != argument.shape or array.dtype != np.dtype(argument.dtype):
            raise ValueError(
                f"program {self.program.name}: {argument.path} is {array.dtype}{list(array.shape)}; expected "
                f"{argument.dtype}{list(argument.shape)}."
            )
        if isinstance(array, jax.Array) and array.sharding == placement:
            return array
        if placement.is_fully_addressable:
            return jax.device_put(array, placement)
        # The same array is in every process, which device_put would compare.
        return jax.make_array_from_callback(array.shape, placement, lambda where: array[where])


def use_compilation_cache(directory: pathlib.Path):
    """From now on JAX keeps what it compiles below `directory`, and looks there first.

    By kind of machine, as a home directory may be shared by several: a CPU's executables use all the instructions it has.
    """
    cpu = pathlib.Path("/proc/cpuinfo")
    described = cpu.read_text(encoding="utf-8").partition("\n\n")[0] if cpu.exists() else ""
    kind = [line for line in described.splitlines() if line.startswith(("model name", "flags", "Features", "CPU part"))]
    name = hashlib.sha256("\n".join([machine.machine(), machine.system(), *kind]).encode()).hexdigest()[:16]
    jax.config.update("jax_compilation_cache_dir", str(directory / name))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def compile_program(program: Program, mesh: Mesh) -> jax.stages.Compiled:
    """Partitions and compiles a program for the devices of `mesh`, which need not be at hand (see `topology`).

    Raises:
      UserError: a mesh axis does not divide a dimension that it cuts.
    """
    _check_divisible(program, mesh)
    donated = tuple(i for i, a in enumerate(program.inputs) if a.path in program.donated)
    call = exported(program).call
    in_shardings, out_shardings = _placements(program, mesh)
    jitted = jax.jit(call, in_shardings=in_shardings, donate_argnums=donated, out_shardings=out_shardings)
    return jitted.lower(*(jax.ShapeDtypeStruct(a.shape, np.dtype(a.dtype)) for a in program.inputs)).compile()


def exported(program: Program) -> export.Exported:
    """The program as if JAX itself had exported it for one device.

    JAX's own format of files would ask for one more package, and a module is all that it holds.
    """

    def avals(arguments):
        return tuple(jax.core.ShapedArray(a.shape, np.dtype(a.dtype)) for a in arguments)

    def tree_of(arguments):
        return jax.tree_util.tree_structure(arguments)

    inputs, outputs = avals(program.inputs), avals(program.outputs)
    allow = export.DisabledSafetyCheck
    return export.Exported(
        fun_name=program.name,
        in_tree=tree_of((inputs, {})),
        in_avals=inputs,
        out_tree=tree_of(outputs),
        out_avals=outputs,
        _has_named_shardings=True,
        _in_named_shardings=(None,) * len(inputs),
        _out_named_shardings=(None,) * len(outputs),
        in_shardings_hlo=(None,) * len(inputs),
        out_shardings_hlo=(None,) * len(outputs),
        nr_devices=1,
        platforms=("cpu",),
        ordered_effects=(),
        unordered_effects=(),
        # The module is the same for every platform: TensorFlow's lowering asked for none.
        disabled_safety_checks=(allow.platform(), *(allow.custom_call(call) for call in _SHARDING_CALLS)),
        mlir_module_serialized=program.module,
        calling_convention_version=export.maximum_supported_calling_convention_version,
        module_kept_var_idx=tuple(range(len(inputs))),
        uses_global_constants=False,
        _get_vjp=None,
    )


def _placements(program: Program, mesh: Mesh) -> tuple[tuple[NamedSharding, ...], tuple[NamedSharding, ...]]:
    """The places of a program's inputs and outputs on `mesh`."""
    inputs, outputs = (
        tuple(_named_sharding(mesh, a) for a in arguments) for arguments in (program.inputs, program.outputs)
    )
    return inputs, outputs


def _find_devices(num_cpu_devices: int, platform: str | None) -> list:
    # Once JAX has started it keeps the CPU devices it has; the caller sees whether they are enough.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", num_cpu_devices)
    try:
        return jax.devices(platform)
    except RuntimeError as error:
        raise UserError(f"--platform={platform}: JAX finds no such device ({str(error).splitlines()[0]}).") from None


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
    """Those of a batch's rows that devices of this process hold; raises UserError where there are others between them."""
    sharding = next(iter(tree.flatten(shardings).values()))
    rows = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]))
    found = {where.indices(batch_size)[:2] for (where,) in rows.addressable_devices_indices_map((batch_size,)).values()}
    held = range(min(start for start, _ in found), max(stop for _, stop in found))
    if sum(stop - start for start, stop in found) != len(held):
        raise UserError(
            f"the devices of process {jax.process_index()} do not hold consecutive rows of a batch; pass a --mesh "
            f"whose first axis a process's devices follow."
        )
    return held


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
