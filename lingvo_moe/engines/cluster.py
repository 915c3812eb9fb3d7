"""Compiles programs for a GPU cluster that does not exist here, with XLA's CUDA compiler alone: no GPU and no driver.

`topology` does the same for TPU slices. The result is the partitioned, scheduled module with the compiler's account of
memory; it cannot be run.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import tempfile
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from lingvo_moe.engines import compilation, compiler_options
from lingvo_moe.engines.topology import GENERATIONS, Compiled, Slice
from lingvo_moe.errors import OutOfMemory, UserError, did_you_mean
from lingvo_moe.program import Program
from lingvo_moe.sharding.layout import DeviceMesh
from lingvo_moe.utils import cuda

_NAME = re.compile(r"(\w+):(\d+)x(\d+)")
MAX_GPUS_PER_NODE = 8
# The compiler writes its schedule, and of its other dumps only what no option leaves out.
_SCHEDULE_OPTIONS = {"xla_dump_latency_hiding_schedule": True, "xla_dump_hlo_module_re": "none of the modules"}
# Machine code without optimisations: for some kernels ptxas takes more than ten minutes otherwise. A plan reads the
# module, the memory and the schedule, which are made before machine code.
_OWN_OPTIONS = ("xla_gpu_disable_gpuasm_optimizations=true",)
# Of the compiler's error where it finds neither ptxas nor a driver.
_NO_ASSEMBLER = "No PTX compilation provider is available"
# Of its error where a matmul, with what it is fused with, fits none of its own kernels. On a GPU it would try others.
_NO_TILES = "Couldn't find output tile sizes"
# What the CUDA context, NCCL and the libraries' workspaces take of a card's memory. An assumption, not a measurement.
_RESERVED = 0.05


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU and its place in a usual node, by the manufacturer's figures without sparsity.

    Attributes:
      compute_capability: major and minor version.
      processors: streaming multiprocessors (SMs).
      shared_memory: bytes of a processor.
      l2_cache: bytes.
      memory: bytes, as the driver reports them.
      memory_bandwidth: bytes per second.
      clock: Hz, the highest.
      peak_flops: operations per second of bfloat16 matrices; `tf32_flops`: of float32 ones, rounded to TF32 as XLA does
        by default; `float32_flops`: without rounding, outside the matrix units.
      nvlink_bandwidth: bytes per second to the other GPUs of a node, in each direction.
      network_bandwidth: bytes per second of a GPU's share of the node's network, in each direction.
      source: the publication of the figures.
      driver_name: what the driver calls it, where XLA has to know. XLA finds its tables of a B200's kernels and
        collectives by this name; without it a schedule has constants, 1 ms for a kernel and 5 ms for an AllReduce. The
        name of an H100 changes only the network, to 200 Gb/s adapters, half of what is planned here.
    """

    compute_capability: tuple[int, int]
    processors: int
    shared_memory: int
    l2_cache: int
    memory: int
    memory_bandwidth: float
    clock: float
    peak_flops: float
    tf32_flops: float
    float32_flops: float
    nvlink_bandwidth: float
    network_bandwidth: float
    source: str
    driver_name: str = "NVIDIA GPU"

    @property
    def available(self) -> int:
        """Bytes of memory that a program can use."""
        return int(self.memory * (1 - _RESERVED))


_XLA = "XLA's target configurations (openxla/xla, xla/backends/gpu/target_config/specs)"
_A100 = Gpu(
    compute_capability=(8, 0),
    processors=108,
    shared_memory=167_936,
    l2_cache=41_943_040,
    memory=85_100_068_864,
    memory_bandwidth=2.04e12,
    clock=1.41e9,
    peak_flops=312e12,
    tf32_flops=156e12,
    float32_flops=19.5e12,
    nvlink_bandwidth=300e9,
    network_bandwidth=25e9,
    source=f"{_XLA}; NVIDIA A100 (SXM, 80 GB) data sheet; DGX A100, one 200 Gb/s adapter for each GPU",
)
_H100 = Gpu(
    compute_capability=(9, 0),
    processors=132,
    shared_memory=233_472,
    l2_cache=52_428_800,
    memory=84_942_979_072,
    memory_bandwidth=3.352e12,
    clock=1.98e9,
    peak_flops=989.4e12,
    tf32_flops=494.7e12,
    float32_flops=66.9e12,
    nvlink_bandwidth=450e9,
    network_bandwidth=50e9,
    source=f"{_XLA}; NVIDIA H100 and H200 (SXM) data sheets; DGX H100, one 400 Gb/s adapter for each GPU",
)
_B200 = Gpu(
    compute_capability=(10, 0),
    processors=148,
    shared_memory=233_472,
    l2_cache=132_644_864,
    memory=191_514_411_008,
    memory_bandwidth=7.672e12,
    clock=1.965e9,
    peak_flops=2250e12,
    tf32_flops=1125e12,
    float32_flops=75e12,
    nvlink_bandwidth=900e9,
    network_bandwidth=50e9,
    source=f"{_XLA}; NVIDIA DGX B200 data sheet, an eighth of it; one 400 Gb/s adapter for each GPU",
    driver_name="NVIDIA B200",
)
GPUS = {
    "a100": _A100,
    "h100": _H100,
    "h200": dataclasses.replace(_H100, memory=151_397_597_184, memory_bandwidth=4.8e12),
    "b200": _B200,
}


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Nodes of GPUs, all alike, joined by NVLink within a node and by a network between nodes.

    Attributes:
      name: `h100:4x8`: a GPU, the number of nodes, and the GPUs of a node.
      generation: the first part of the name.
      nodes, gpus_per_node: the other parts.
      devices: all GPUs, node by node, as JAX describes them.
      is_limited: whether a program that needs more memory than there is is refused.
      compiler_options: of XLA's compiler for GPUs beside its defaults, each `NAME=VALUE`: those of XLA_FLAGS,
        ours, and the user's.
    """

    name: str
    generation: str
    nodes: int
    gpus_per_node: int
    devices: tuple
    is_limited: bool = True
    compiler_options: tuple[str, ...] = ()

    @staticmethod
    def of(name: str, options: Sequence[str] = ()) -> Cluster:
        """Describes a cluster.

        Args:
          name: of the cluster.
          options: of the compiler, each `NAME=VALUE`.

        Raises:
          UserError: there is no such GPU, XLA's CUDA compiler is not installed, or it refuses an option.
        """
        matched = _NAME.fullmatch(name.lower())
        if not matched:
            raise UserError(
                f"--topology={name} cannot be parsed; expected a GPU, the number of nodes and the GPUs of a node, for "
                f"instance h100:4x8."
            )
        generation, nodes, gpus = matched[1], int(matched[2]), int(matched[3])
        if generation not in GPUS:
            raise UserError(
                f"--topology={name}: no such GPU.{did_you_mean(generation, GPUS)} Known: {', '.join(GPUS)}."
            )
        if nodes < 1 or not 1 <= gpus <= MAX_GPUS_PER_NODE:
            raise UserError(
                f"--topology={name}: {nodes} nodes of {gpus} GPUs; expected at least one node of 1 to "
                f"{MAX_GPUS_PER_NODE} GPUs, for instance {generation}:4x8."
            )
        devices = tuple(_devices(GPUS[generation], nodes, gpus))
        compiler_options.check(options, devices[0], name)
        named = compiler_options.merge(_OWN_OPTIONS, options)
        obeyed = compiler_options.merge(compiler_options.of_environment("XLA_FLAGS", "xla_gpu_"), named)
        return Cluster(name.lower(), generation, nodes, gpus, devices, compiler_options=obeyed)

    @property
    def gpu(self) -> Gpu:
        """The figures of one GPU."""
        return GPUS[self.generation]

    def check(self, mesh: DeviceMesh):
        """Raises UserError if a mesh does not have as many devices as the cluster has GPUs."""
        if mesh.size != len(self.devices):
            raise UserError(
                f"--topology={self.name} has {len(self.devices)} GPUs; the mesh is {mesh}, of {mesh.size}. Pass "
                f"--mesh={len(self.devices)}, or a cluster of {mesh.size} GPUs."
            )

    def with_more_memory(self) -> Cluster:
        """Returns the same cluster with any amount of memory, to plan what did not fit."""
        return dataclasses.replace(self, is_limited=False)

    def compile(self, program: Program) -> Compiled:
        """Compiles a program for the cluster.

        Raises:
          UserError: the program was made for another number of devices.
          OutOfMemory: it does not fit; the compiler does not say so, so its account of memory is compared.
        """
        self.check(program.mesh)
        mesh = Mesh(np.array(self.devices).reshape(program.mesh.shape), program.mesh.axis_names)
        options = _SCHEDULE_OPTIONS | compiler_options.parse(self.compiler_options)
        with tempfile.TemporaryDirectory() as directory:
            executable = _compile(program, mesh, options | {"xla_dump_to": directory})
            # None for an A100, of whose kernels the compiler has no estimates.
            schedule = next(pathlib.Path(directory).glob("*.schedule.txt"), None)
            compiled = Compiled(program, executable, schedule and schedule.read_text(encoding="utf-8"))
        stats = compiled.memory()
        needed = (
            stats.argument_size_in_bytes
            + stats.temp_size_in_bytes
            + stats.output_size_in_bytes
            - stats.alias_size_in_bytes
        )
        if self.is_limited and needed > self.gpu.available:
            raise OutOfMemory(needed, self.gpu.available)
        return compiled


def _compile(program: Program, mesh: Mesh, options: Mapping[str, str | bool]) -> jax.stages.Compiled:
    """Compiles by XLA's CUDA compiler.

    Raises:
      UserError: it finds no assembler, or cannot divide a matmul into tiles.
    """
    try:
        return compilation.compile_program(program, mesh, options)
    except jax.errors.JaxRuntimeError as error:
        if _NO_TILES in str(error):
            raise UserError(
                "XLA's CUDA compiler cannot divide a matmul of this program into tiles of its own (Triton) kernels. "
                "Use cuBLAS for the matmuls: --compiler_option=xla_gpu_enable_triton_gemm=false."
            ) from error
        if _NO_ASSEMBLER not in str(error):
            raise
        raise UserError(
            "XLA's CUDA compiler found neither ptxas nor a CUDA toolkit: make setup, or pip install "
            "'lingvo_moe[gpu-compiler]'."
        ) from error


def target_of(name: str, options: Sequence[str] = ()) -> Slice | Cluster:
    """Describes what a topology's name stands for: a TPU slice or a cluster of GPUs.

    Args:
      name: of the topology, `v3:32x32x1` or `h100:4x8`.
      options: of the compiler, each `NAME=VALUE`.

    Raises:
      UserError: the first part names no TPU and no GPU, or as `Slice.of` and `Cluster.of`.
    """
    generation = name.partition(":")[0].lower()
    if generation in GPUS:
        return Cluster.of(name, options)
    if generation in GENERATIONS:
        return Slice.of(name, options)
    raise UserError(
        f"--topology={name}: no such TPU or GPU.{did_you_mean(generation, [*GENERATIONS, *GPUS])} Known: the TPUs "
        f"{', '.join(GENERATIONS)}, as in {GENERATIONS['v3']}; the GPUs {', '.join(GPUS)}, as in h100:4x8."
    )


def _devices(gpu: Gpu, nodes: int, gpus_per_node: int) -> list:
    if not cuda.has_compiler():
        raise UserError(
            "XLA's CUDA compiler is not installed, which plans for GPUs need (250 MB, no GPU and no driver): "
            "make setup, or pip install 'lingvo_moe[gpu-compiler]'."
        )
    try:
        # Slices, in XLA's terms, are joined by NVLink; a node is one, and one process has all of its GPUs.
        return topologies.get_topology_desc(
            platform="cuda", target_config=_target_config(gpu), topology=f"{nodes}x1x{gpus_per_node}"
        ).devices
    except NotImplementedError:
        raise UserError(
            "JAX refused XLA's CUDA compiler (its log says why); without CUDA, set JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 "
            "before JAX starts, as the command line does."
        ) from None


def _target_config(gpu: Gpu) -> str:
    """Returns the text of XLA's `GpuTargetConfigProto`, which describes the GPU that it compiles for."""
    major, minor = gpu.compute_capability
    return f"""
        platform_name: "CUDA"
        device_description_str: "{gpu.driver_name}"
        runtime_version {{ major: 13 }}
        dnn_version_info {{ major: 9 minor: 7 }}
        gpu_device_info {{
          cuda_compute_capability {{ major: {major} minor: {minor} }}
          core_count: {gpu.processors}
          fpus_per_core: {128 if major > 8 else 64}
          threads_per_warp: 32
          threads_per_block_limit: 1024
          threads_per_core_limit: 2048
          registers_per_core_limit: 65536
          registers_per_block_limit: 65536
          shared_memory_per_block: {48 * 1024}
          shared_memory_per_block_optin: {gpu.shared_memory - 1024}
          shared_memory_per_core: {gpu.shared_memory}
          block_dim_limit_x: {2**31 - 1}
          block_dim_limit_y: 65535
          block_dim_limit_z: 65535
          l2_cache_size: {gpu.l2_cache}
          clock_rate_ghz: {gpu.clock / 1e9}
          device_memory_size: {gpu.memory}
          memory_bandwidth: {int(gpu.memory_bandwidth)}
        }}
    """
