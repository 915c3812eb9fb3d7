"""Compiles programs for a GPU cluster that does not exist here, with XLA's CUDA compiler alone: no GPU and no driver.

`topology` does the same for TPU slices. The result is the partitioned, scheduled module with the compiler's account of
memory; it cannot be run.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from typing import TYPE_CHECKING

import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from lingvo_moe.engines import pjrt
from lingvo_moe.engines.topology import Compiled, OutOfMemory
from lingvo_moe.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from lingvo_moe.program import Program
    from lingvo_moe.sharding.layout import DeviceMesh

GIGA = 10**9
_NAME = re.compile(r"(\w+):(\d+)x(\d+)")
_MAX_GPUS_PER_NODE = 8
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

    @property
    def available(self) -> int:
        """Bytes of memory that a program can use."""
        return int(self.memory * (1 - _RESERVED))


_MEBI = 2**20
_AMPERE = "NVIDIA A100 (SXM, 80 GB) data sheet; DGX A100, one 200 Gb/s adapter for each GPU"
_HOPPER = "NVIDIA H100 and H200 (SXM) data sheets; DGX H100, one 400 Gb/s adapter for each GPU"
_BLACKWELL = "NVIDIA DGX B200 data sheet, an eighth of it; one 400 Gb/s adapter for each GPU"
GPUS = {
    "a100": Gpu(
        (8, 0), 108, 164 * 1024, 40 * _MEBI, 84_974 * 10**6, 2039 * GIGA, 1.41e9,
        312e12, 156e12, 19.5e12, 300 * GIGA, 25 * GIGA, _AMPERE,
    ),
    "h100": Gpu(
        (9, 0), 132, 228 * 1024, 50 * _MEBI, 84_929 * 10**6, 3352 * GIGA, 1.98e9,
        989.4e12, 494.7e12, 66.9e12, 450 * GIGA, 50 * GIGA, _HOPPER,
    ),
    "h200": Gpu(
        (9, 0), 132, 228 * 1024, 50 * _MEBI, 150_000 * 10**6, 4800 * GIGA, 1.98e9,
        989.4e12, 494.7e12, 66.9e12, 450 * GIGA, 50 * GIGA, _HOPPER,
    ),
    "b200": Gpu(
        (10, 0), 148, 228 * 1024, 126 * _MEBI, 191_500 * 10**6, 8000 * GIGA, 1.965e9,
        2250e12, 1125e12, 75e12, 900 * GIGA, 50 * GIGA, _BLACKWELL,
    ),
}  # fmt: skip


def is_cluster(name: str) -> bool:
    """Returns whether the name of a topology is meant as a cluster of GPUs: its first part has a GPU's form."""
    return re.match(r"[abhlv]\d{2,}", name.lower()) is not None


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Nodes of GPUs, all alike, joined by NVLink within a node and by a network between nodes.

    Attributes:
      name: `h100:4x8`: a GPU, the number of nodes, and the GPUs of a node.
      generation: the first part of the name.
      nodes, gpus_per_node: the other parts.
      devices: all GPUs, node by node, as JAX describes them.
      is_limited: whether a program that needs more memory than there is is refused.
    """

    name: str
    generation: str
    nodes: int
    gpus_per_node: int
    devices: tuple
    is_limited: bool = True

    platform = "gpu"

    @staticmethod
    def of(name: str) -> Cluster:
        """Describes a cluster; raises UserError if there is no such GPU, or if XLA's CUDA compiler is not installed."""
        matched = _NAME.fullmatch(name.lower())
        if not matched:
            raise UserError(
                f"--topology={name} is not understood; write a GPU, the number of nodes and the GPUs of a node, for "
                f"instance h100:4x8."
            )
        generation, nodes, gpus = matched[1], int(matched[2]), int(matched[3])
        if generation not in GPUS:
            raise UserError(
                f"--topology={name}: no such GPU.{did_you_mean(generation, GPUS)} Known: {', '.join(GPUS)}."
            )
        if nodes < 1 or not 1 <= gpus <= _MAX_GPUS_PER_NODE:
            raise UserError(
                f"--topology={name}: {nodes} nodes of {gpus} GPUs; expected at least one node of 1 to "
                f"{_MAX_GPUS_PER_NODE} GPUs, for instance {generation}:4x8."
            )
        return Cluster(name, generation, nodes, gpus, tuple(_devices(GPUS[generation], nodes, gpus)))

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

    def load(self, program: Program) -> Compiled:
        """Compiles a program for the cluster.

        Raises:
          UserError: the program was made for another number of devices.
          OutOfMemory: it does not fit; the compiler does not say so, so its account of memory is compared.
        """
        self.check(program.mesh)
        mesh = Mesh(np.array(self.devices).reshape(program.mesh.shape), program.mesh.axis_names)
        compiled = Compiled(program, pjrt.compile_program(program, mesh))
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


def _devices(gpu: Gpu, nodes: int, gpus_per_node: int) -> list:
    if importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        raise UserError(
            "XLA's CUDA compiler is not installed, which plans for GPUs need (124 MB, no GPU and no driver): "
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
        device_description_str: "NVIDIA GPU"
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
