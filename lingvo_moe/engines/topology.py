"""Compiles programs for a TPU slice that does not exist here: libtpu, the TPU's own compiler, runs on any machine.

The result is the partitioned, scheduled module with the compiler's account of memory and cycles; it cannot be run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import logging
import math
import os
import re
from collections.abc import Iterator, Sequence

import numpy as np
from jax.errors import JaxRuntimeError
from jax.experimental import topologies
from jax.sharding import Mesh

from lingvo_moe.engines import compilation, compiler_options
from lingvo_moe.engines.base import torus_order
from lingvo_moe.errors import OutOfMemory, UserError, did_you_mean
from lingvo_moe.program import Program
from lingvo_moe.sharding.layout import DeviceMesh
from lingvo_moe.utils.counts import counted

_logger = logging.getLogger(__name__)
# The generations that libtpu 0.0.51 compiles for, and an example of a slice's name.
GENERATIONS = {
    "v2": "v2:4x4x1",
    "v3": "v3:32x32x1",
    "v4": "v4:4x4x4",
    "v5e": "v5e:16x16",
    "v5p": "v5p:4x4x4",
    "v6e": "v6e:16x16",
    "tpu7x": "tpu7x:4x4x4",
}
_LARGE_MEMORY = "v5p"
_WITHOUT_LARGER_MEMORY = ("v5p", "tpu7x")  # 95 and 96 GiB
# The largest slice of each generation, by Jouppi et al. 2020, table 1, and the Google Cloud TPU documentation: the
# sides of a flat one, the chips of one of three dimensions, which has many shapes. For a larger v5e libtpu aborts the
# process; for larger ones of other generations it compiles.
_LARGEST_FLAT = {"v2": (16, 16), "v3": (32, 32), "v5e": (16, 16), "v6e": (16, 16)}
_MOST_CHIPS = {"v4": 4096, "v5p": 8960, "tpu7x": 9216}
# libtpu writes what it gives to SparseCores as async-updates with several operands, which jaxlib 0.10.2 refuses to
# read. Plans of these generations are for TensorCores alone.
_WITH_SPARSE_CORES = ("v5p", "v6e", "tpu7x")
_WITHOUT_SPARSE_CORES = {
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": "false",
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": "false",
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "false",
    "xla_tpu_enable_offloading_scatter_to_sparsecore": "false",
    "xla_tpu_offload_gather_to_sparsecore": "false",
}
MESH_FLAG = "--mesh"  # of most commands
_OTHER_SLICE = f"pass --topology, for instance {GENERATIONS['v3']}"
_NAME = re.compile(r"(\w+):(\d+(?:x\d+){1,2})")
_EXCEEDED = re.compile(r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Slice:
    """A TPU slice.

    Attributes:
      name: in libtpu's notation, `v3:32x32x1`: a generation, and the number of chips along each dimension of the torus.
      generation: the first part of the name.
      chips: the number of chips along each dimension.
      devices: all cores, as JAX describes them, in `base.torus_order`; JAX lists them host by host.
      compiler_options: of libtpu's compiler beside its defaults, each `NAME=VALUE`: those of LIBTPU_INIT_ARGS that
        are not flags of all of libtpu, and the user's.
    """

    name: str
    generation: str
    chips: tuple[int, ...]
    devices: tuple
    compiler_options: tuple[str, ...] = ()

    @staticmethod
    def of(name: str, options: Sequence[str] = ()) -> Slice:
        """Asks libtpu for a slice.

        Args:
          name: of the slice, in letters of any case.
          options: of the compiler, each `NAME=VALUE`.

        Raises:
          UserError: there is no slice of that name, libtpu is not installed, or its compiler refuses an option.
        """
        matched = _NAME.fullmatch(name.lower())
        if not matched:
            raise UserError(
                f"--topology={name} cannot be parsed; expected a generation and the chips along each dimension, "
                f"for instance {', '.join(GENERATIONS.values())}."
            )
        generation, chips = matched[1], tuple(map(int, matched[2].split("x")))
        if generation not in GENERATIONS:
            raise UserError(
                f"--topology={name}: no such TPU generation.{did_you_mean(generation, GENERATIONS)} Known: "
                f"{', '.join(GENERATIONS)}."
            )
        # libtpu aborts the process for a zero, and accepts only slices of whole hosts of 2 x 2 chips.
        if any(size == 0 for size in chips) or any(size % 2 for size in chips[:2]):
            raise UserError(
                f"--topology={name}: a host holds 2x2 chips, so the first two sizes must be even and none may be 0; "
                f"for instance {GENERATIONS[generation]}."
            )
        if not exists(generation, chips):
            largest = _MOST_CHIPS.get(generation) or "{}x{}".format(*_LARGEST_FLAT[generation])
            raise UserError(
                f"--topology={name}: there is no such slice; the largest of {generation} has {largest} chips. Take a "
                f"smaller one, or another generation: {', '.join(GENERATIONS)}."
            )
        devices = tuple(sorted(_devices(name.lower()), key=lambda each: torus_order(each.coords, each.core_on_chip)))
        own = _own_options(generation)
        of_libtpu = compiler_options.of_environment("LIBTPU_INIT_ARGS", "xla_")
        with _without_flags_of_xla():
            compiler_options.check(options, devices[0], name)
            obeyed = compiler_options.accepted(of_libtpu, devices[0])
        obeyed = [option for option in obeyed if option.partition("=")[0] not in own]
        return Slice(name.lower(), generation, chips, devices, compiler_options.merge(obeyed, options))

    def check(self, mesh: DeviceMesh, mesh_flag: str = MESH_FLAG):
        """Raises UserError if a mesh does not have as many devices as the slice has cores.

        Args:
          mesh: the mesh.
          mesh_flag: of the command, which selects the mesh; for the remedy.
        """
        if mesh.size != len(self.devices):
            raise UserError(
                f"--topology={self.name} has {len(self.devices)} cores; the mesh is {mesh}, of {mesh.size}. Pass "
                f"{mesh_flag}={len(self.devices)}, or a slice of {mesh.size} cores."
            )

    def with_more_memory(self) -> Slice | None:
        """Returns a slice of equally many cores with more memory, to plan what did not fit; None if there is none."""
        if self.generation in _WITHOUT_LARGER_MEMORY:
            return None
        *sides, depth = (*self.chips, 1)[:3]
        depth *= len(self.devices) // math.prod(self.chips)
        if not exists(_LARGE_MEMORY, (*sides, depth)):
            return None
        return Slice.of(f"{_LARGE_MEMORY}:{'x'.join(map(str, (*sides, depth)))}", self.compiler_options)

    def compile(self, program: Program) -> Compiled:
        """Compiles a program for the slice.

        Raises:
          UserError: the program was made for another number of devices.
          OutOfMemory: it does not fit.
        """
        self.check(program.mesh)
        mesh = Mesh(np.array(self.devices).reshape(program.mesh.shape), program.mesh.axis_names)
        options = _own_options(self.generation) | compiler_options.parse(self.compiler_options)
        try:
            with _without_flags_of_xla():
                return Compiled(program, compilation.compile_program(program, mesh, options))
        except JaxRuntimeError as error:
            raise _out_of_memory(str(error)) or error from None


def most_chips(generation: str) -> int:
    """Returns the number of chips of the largest slice of a generation."""
    return _MOST_CHIPS.get(generation) or math.prod(_LARGEST_FLAT[generation])


def exists(generation: str, chips: Sequence[int]) -> bool:
    """Whether a generation has a slice as large as `chips`, the chips along two or three dimensions."""
    if generation in _MOST_CHIPS:
        return math.prod(chips) <= _MOST_CHIPS[generation]
    return all(size <= largest for size, largest in zip(chips, (*_LARGEST_FLAT[generation], 1)))


def v3_slice(num_cores: int, remedy: str = f"{_OTHER_SLICE}, or {MESH_FLAG} with a multiple of 8") -> str:
    """Returns the name of the squarest TPU v3 slice of `num_cores`, two a chip; raises UserError if there is none.

    Args:
      num_cores: the number of cores.
      remedy: what to do in the command if there is none.
    """
    chips = num_cores // 2
    sides = [
        side for side in range(2, math.isqrt(max(chips, 0)) + 1, 2) if chips % side == 0 and chips // side % 2 == 0
    ]
    if num_cores % 8 or not sides or not exists("v3", (chips // sides[-1], sides[-1])):
        raise UserError(
            f"there is no TPU v3 slice of {counted(num_cores, 'core')}, which come in hosts of 8, up to "
            f"{2 * most_chips('v3')}; {remedy}."
        )
    return f"v3:{chips // sides[-1]}x{sides[-1]}x1"


def _own_options(generation: str) -> dict[str, str | bool]:
    return dict(_WITHOUT_SPARSE_CORES) if generation in _WITH_SPARSE_CORES else {}


class Compiled:
    """A program compiled for devices that are not here; it cannot be called.

    Attributes:
      program: what was compiled.
      schedule: the text of the compiler's schedule, if it writes one.
    """

    def __init__(self, program: Program, compiled, schedule: str | None = None):
        self.program, self.schedule, self._compiled = program, schedule, compiled

    def hlo(self) -> str:
        """Returns the text of the partitioned module; raises UserError if this version of JAX cannot read it."""
        try:
            return self._compiled.as_text()
        except JaxRuntimeError as error:
            raise UserError(
                f"the program compiles, but jaxlib cannot read the module that libtpu made ({str(error)[:200]}). Plan "
                f"for another generation of TPU, or install a newer jax with its libtpu."
            ) from None

    def flops(self) -> float:
        """Returns the floating-point operations of one core, counted by the compiler; a loop's body counts once."""
        return self._compiled.cost_analysis().get("flops", 0.0)

    def memory(self):
        """Returns the compiler's account of memory per core: arguments, outputs, aliased and temporary bytes."""
        return self._compiled.memory_analysis()


def _devices(name: str) -> list:
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            "libtpu, the TPU's compiler, is not installed: make setup, or pip install 'lingvo_moe[tpu-compiler]'."
        )
    import libtpu

    # libtpu guards its TPU with a lock, which compiling does not need.
    for variable, value in (("TPU_LIBRARY_PATH", libtpu.get_library_path()), ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")):
        os.environ.setdefault(variable, value)
    try:
        with _without_flags_of_xla():
            return topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    except JaxRuntimeError as error:
        if "lockfile" in str(error):
            raise UserError(
                "another process holds libtpu's lock; wait until it ends, or set ALLOW_MULTIPLE_LIBTPU_LOAD=1, "
                "which is safe where no TPU is used."
            ) from None
        raise UserError(
            f"--topology={name}: libtpu knows no such slice ({str(error).partition(': ')[2].splitlines()[0]}). "
            f"For instance: {', '.join(GENERATIONS.values())}."
        ) from None


@contextlib.contextmanager
def _without_flags_of_xla() -> Iterator[None]:
    """Hides XLA_FLAGS: libtpu, whose own are in LIBTPU_INIT_ARGS, ends the process for one that it does not know."""
    flags = os.environ.pop("XLA_FLAGS", None)
    if flags:
        _log_hidden(flags)
    try:
        yield
    finally:
        if flags is not None:
            os.environ["XLA_FLAGS"] = flags


@functools.cache  # once, not for each program
def _log_hidden(flags: str):
    _logger.info("libtpu does not get XLA_FLAGS=%s; its own flags are those of LIBTPU_INIT_ARGS.", flags)


def _out_of_memory(message: str) -> OutOfMemory | None:
    matched = _EXCEEDED.search(message)
    return OutOfMemory(_bytes(matched[1], matched[2]), _bytes(matched[3], matched[4])) if matched else None


def _bytes(number: str, unit: str) -> int:
    return math.ceil(float(number) * _UNITS[unit])
