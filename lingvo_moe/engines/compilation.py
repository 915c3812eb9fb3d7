"""Compiles programs for JAX devices, which need not exist here, and caches what it compiles."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import platform as machine
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax import core, export
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lingvo_moe.errors import UserError
from lingvo_moe.program import COMPILER_DEFAULT, Argument, Program
from lingvo_moe.utils import processor
from lingvo_moe.utils.hashes import sha256

_SHARDING_CALLS = ("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape")
# libtpu's option for windowed einsums. On TPU v2 and v3, CollectivePermutes are synchronous without the second one, so
# that no slice would arrive during a matmul.
_WINDOWED_EINSUM = "xla_jf_spmd_threshold_for_windowed_einsum_mib"
_ASYNCHRONOUS_PERMUTES = {"xla_enable_async_collective_permute": "true"}


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
      UserError: a mesh axis does not divide a dimension that it shards, or the program sets `windowed_einsum_mib`,
        which only the TPU compiler supports.
    """
    program.check_divisible()
    windowed = _windowed_einsum_options(program, mesh.devices.flat[0].platform)
    donated = tuple(i for i, a in enumerate(program.inputs) if a.path in program.donated)
    call = exported(program).call
    in_shardings, out_shardings = shardings(program, mesh)
    jitted = jax.jit(call, in_shardings=in_shardings, donate_argnums=donated, out_shardings=out_shardings)
    lowered = jitted.lower(*(jax.ShapeDtypeStruct(a.shape, np.dtype(a.dtype)) for a in program.inputs))
    return lowered.compile(compiler_options={**windowed, **(options or {})})


def _windowed_einsum_options(program: Program, platform: str) -> dict[str, str]:
    if program.windowed_einsum_mib == COMPILER_DEFAULT:
        return {}
    if platform != "tpu":
        # XLA has options for GPUs, which change nothing in jaxlib 0.10.2 (docs/operators.md), and none for CPUs.
        raise UserError(
            f"program {program.name} has windowed_einsum_mib={program.windowed_einsum_mib}: XLA supports windowed "
            f"einsums only on TPUs, and this is a {platform}. Use --set windowed_einsum_mib={COMPILER_DEFAULT}."
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


def shardings(program: Program, mesh: Mesh) -> tuple[tuple[NamedSharding, ...], tuple[NamedSharding, ...]]:
    """Returns the shardings of a program's inputs and outputs on `mesh`."""
    inputs, outputs = (
        tuple(_named_sharding(mesh, a) for a in arguments) for arguments in (program.inputs, program.outputs)
    )
    return inputs, outputs


def _named_sharding(mesh: Mesh, argument: Argument) -> NamedSharding:
    axes = [None if axis < 0 else mesh.axis_names[axis] for axis in argument.dims_mapping]
    return NamedSharding(mesh, PartitionSpec(*axes))
