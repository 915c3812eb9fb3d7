"""Published figures of TPUs, and models of the time that a collective takes: ours, not the compilers'."""

from __future__ import annotations

import dataclasses
import math

from lingvo_moe.engines.cluster import GPUS, Cluster, Gpu

GIGA = 10**9
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Generation:
    """One generation of TPUs.

    Attributes:
      cores_per_chip: the number of cores (JAX devices) of a chip.
      clock: Hz of a core; None if it is not published.
      peak_flops: bfloat16 operations per second of a device.
      link_bandwidth: bytes per second of one link between chips, in each direction.
      memory: bytes of a device.
      memory_bandwidth: bytes per second of a device.
      source: the publication of the figures.
    """

    cores_per_chip: int
    clock: float | None
    peak_flops: float
    link_bandwidth: float
    memory: int
    memory_bandwidth: float
    source: str


_2020 = "Jouppi et al. 2020, 'A domain-specific supercomputer for training deep neural networks', CACM 63(7), table 1"
_2023 = "Jouppi et al. 2023, 'TPU v4: an optically reconfigurable supercomputer', ISCA, table 4"
_CLOUD = "Google Cloud TPU documentation, system architecture; the clock is peak / (2 x multipliers)"
GENERATIONS = {
    "v2": Generation(2, 700e6, 22.5e12, 62 * GIGA, 8 * GIB, 350 * GIGA, _2020),
    "v3": Generation(2, 940e6, 61.5e12, 82 * GIGA, 16 * GIB, 450 * GIGA, _2020),
    "v4": Generation(2, 1050e6, 137.5e12, 50 * GIGA, 16 * GIB, 600 * GIGA, _2023),
    "v5e": Generation(1, 1500e6, 197e12, 50 * GIGA, 16 * GIB, 819 * GIGA, _CLOUD),
    "v5p": Generation(1, 1750e6, 459e12, 100 * GIGA, 95 * GIB, 2765 * GIGA, _CLOUD),
    "v6e": Generation(1, 1750e6, 918e12, 112 * GIGA, 32 * GIB, 1640 * GIGA, _CLOUD),
    "tpu7x": Generation(2, None, 1153e12, 100 * GIGA, 96 * GIB, 3690 * GIGA, _CLOUD),
}


def hardware_of(topology: str) -> Generation | Gpu:
    """Returns the figures of a topology's TPUs or GPUs."""
    name = topology.partition(":")[0]
    return GPUS[name] if name in GPUS else GENERATIONS[name]


@dataclasses.dataclass(frozen=True)
class Network:
    """The links of a cluster of GPUs: NVLink between those of a node, and a network adapter for each GPU.

    Attributes:
      cluster: its nodes. Devices are numbered node by node.
    """

    cluster: Cluster

    def seconds(self, kind: str, size: int, group: int, stride: int) -> float:
        """Returns the seconds of one collective, alone on the links, at their full bandwidth; all groups run at once.

        What stays in a node goes over NVLink and what leaves it over the adapters, at the same time; so this is the
        longer of the two. An AllReduce or AllGather sends each byte to another node once, over all adapters of the
        node's part of the group; an AllToAll sends different bytes to each device.

        Args:
          kind: see `collectives.COLLECTIVES`.
          size: bytes of the result on each device.
          group: the number of devices that communicate with each other.
          stride: the difference between the numbers of neighbours in the group.
        """
        local = max(1, min(group, self.cluster.gpus_per_node // stride))
        nodes = -(-group // local)
        gpu = self.cluster.gpu
        if kind in ("all-to-all", "ragged-all-to-all"):
            inside, outside = size * (local - 1) / group, size * (group - local) / group
        elif kind in ("all-reduce", "all-gather", "reduce-scatter"):
            whole = size * {"all-reduce": 2, "all-gather": 1, "reduce-scatter": group}[kind]
            inside, outside = whole * (1 - 1 / local), whole * (1 - 1 / nodes) / local
        else:  # a permutation between neighbours, a broadcast
            inside, outside = size, size * (nodes > 1)
        return max(inside / gpu.nvlink_bandwidth, outside / gpu.network_bandwidth)


@dataclasses.dataclass(frozen=True)
class Torus:
    """The chips of a slice: a torus with a ring along each dimension, and a link between neighbours in each direction.

    Attributes:
      generation: of the chips.
      chips: along each dimension. Devices are numbered core by core, then along the first dimension, the second, ...
    """

    generation: Generation
    chips: tuple[int, ...]

    def seconds(self, kind: str, size: int, group: int, stride: int) -> float:
        """Returns the seconds of one collective, alone on the links, at their full bandwidth; all groups run at once.

        AllReduce is a ReduceScatter and an AllGather around rings in all dimensions at once, each moving all data
        except a device's own part: O(1) in the number of devices. An AllToAll is bound by the links across the middle
        of the group's longest dimension: O(sqrt(devices)) on a two-dimensional torus (GShard section 5.3).

        Args:
          kind: see `collectives.COLLECTIVES`.
          size: bytes of the result on each device.
          group: the number of devices that communicate with each other.
          stride: the difference between the numbers of neighbours in the group.
        """
        extents = self._extents(group, stride)
        rings = [
            (extent, extent == chips) for extent, chips in zip(extents, self.chips) if extent > 1
        ]  # (chips, closed)
        if not rings:
            return 0.0  # between the cores of one chip, through its memory
        bandwidth = self.generation.link_bandwidth
        links = sum(2 if closed and extent > 2 else 1 for extent, closed in rings)
        remote = 1 - 1 / math.prod(extents)
        if kind == "all-reduce":
            return 2 * size * remote / (links * bandwidth)
        if kind == "all-gather":
            return size * remote / (links * bandwidth)
        if kind == "reduce-scatter":
            return size * group * remote / (links * bandwidth)
        if kind in ("all-to-all", "ragged-all-to-all"):
            longest, closed = max(rings)
            across = math.prod(extents) // longest * (2 if closed and longest > 2 else 1)
            return size * group / 4 / (across * bandwidth)
        return size / bandwidth  # a permutation between neighbours, a broadcast around a ring

    def _extents(self, group: int, stride: int) -> tuple[int, ...]:
        """Returns the number of chips that a group spans along each dimension."""
        sizes = (self.generation.cores_per_chip, *self.chips)
        extents, below = [], 1
        for size in sizes:
            first, last = max(below, stride), min(below * size, stride * group)
            extents.append(max(1, last // first))
            below *= size
        return tuple(extents[1:])
