"""Published figures of TPUs, and models of the time that a collective takes: ours, not the compilers'."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from lingvo_moe.engines.cluster import GPUS, Cluster, Gpu
from lingvo_moe.engines.topology import Slice

GIGA = 10**9
GIB = 2**30
_ALL_TO_ALLS = ("all-to-all", "ragged-all-to-all")


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

    def seconds(self, kind: str, size: float, group: Sequence[int]) -> float:
        """Returns the seconds of one collective, alone on the links, at their full bandwidth; all groups run at once.

        What stays in a node goes over NVLink and what leaves it over the adapters, at the same time; so this is the
        longer of the two. An AllReduce or AllGather sends each byte to another node once, over all adapters of the
        node's part of the group; an AllToAll sends different bytes to each device.

        Args:
          kind: one of `collectives.COLLECTIVES` but `collective-permute`, see `permute_seconds`.
          size: bytes of the result on each device.
          group: the numbers of the devices of one group; the other groups are alike.
        """
        of_nodes = collections.Counter(device // self.cluster.gpus_per_node for device in group)
        local, nodes = max(of_nodes.values()), len(of_nodes)
        if kind in _ALL_TO_ALLS:
            inside, outside = size * (local - 1) / len(group), size * (len(group) - local) / len(group)
        elif kind in ("all-reduce", "all-gather", "reduce-scatter"):
            whole = size * {"all-reduce": 2, "all-gather": 1, "reduce-scatter": len(group)}[kind]
            inside, outside = whole * (1 - 1 / local), whole * (1 - 1 / nodes) / local
        else:  # a broadcast
            inside, outside = size, size * (nodes > 1)
        return self._longer(inside, outside)

    def permute_seconds(self, size: float, pairs: Sequence[tuple[int, int]]) -> float:
        """Returns the seconds of a CollectivePermute of `size` bytes from each source to its target."""
        node = self.cluster.gpus_per_node
        leaves = any(source // node != target // node for source, target in pairs)
        stays = any(source // node == target // node and source != target for source, target in pairs)
        return self._longer(size * stays, size * leaves)

    def _longer(self, inside: float, outside: float) -> float:
        """Returns the seconds of these bytes over a device's NVLink and its adapter."""
        gpu = self.cluster.gpu
        return max(inside / gpu.nvlink_bandwidth, outside / gpu.network_bandwidth)


@dataclasses.dataclass(frozen=True)
class _Span:
    """Where a group is along one dimension: its positions, the spacing between neighbours, and all there are."""

    positions: int
    spacing: int
    size: int

    @property
    def links(self) -> float:
        """The links in each direction that the group has to itself.

        Evenly spaced positions of a whole ring use it both ways, others are a line. The groups in between use the same
        links. Two chips have one link between them.
        """
        is_ring = self.positions * self.spacing == self.size > 2
        return (2 if is_ring else 1) / self.spacing


@dataclasses.dataclass(frozen=True)
class Torus:
    """The chips of a slice: a torus with a ring along each dimension, and a link between neighbours in each direction.

    Attributes:
      generation: of the chips.
      chips: along each dimension. Devices are numbered core by core, then along the first dimension, the second, ...
    """

    generation: Generation
    chips: tuple[int, ...]

    def seconds(self, kind: str, size: float, group: Sequence[int]) -> float:
        """Returns the seconds of one collective, alone on the links, at their full bandwidth; all groups run at once.

        AllReduce is a ReduceScatter and an AllGather around rings in all dimensions at once, each moving all data
        except a device's own part: O(1) in the number of devices. An AllToAll is bound by the links across the middle
        of one of the group's dimensions: O(sqrt(devices)) on a two-dimensional torus (GShard section 5.3). Groups
        with other cores of the same chips, or with the chips in between, share the links.

        Args:
          kind: one of `collectives.COLLECTIVES` but `collective-permute`, see `permute_seconds`.
          size: bytes of the result on each device.
          group: the numbers of the devices of one group; the other groups are alike.
        """
        cores, *dimensions = self._spans(group)
        spans = [span for span in dimensions if span.positions > 1]
        if not spans:
            return 0.0  # between the cores of one chip, through its memory
        bandwidth = self.generation.link_bandwidth * cores.positions / cores.size
        links = sum(span.links for span in spans)
        chips = math.prod(span.positions for span in spans)
        remote = 1 - 1 / chips
        if kind == "all-reduce":
            return 2 * size * remote / (links * bandwidth)
        if kind == "all-gather":
            return size * remote / (links * bandwidth)
        if kind == "reduce-scatter":
            return size * len(group) * remote / (links * bandwidth)
        if kind in _ALL_TO_ALLS:
            across = min(chips // span.positions * span.links for span in spans)
            return size * len(group) / 4 / (across * bandwidth)
        return size * max(span.spacing for span in spans) / bandwidth  # a broadcast, around a ring

    def permute_seconds(self, size: float, pairs: Sequence[tuple[int, int]]) -> float:
        """Returns the seconds of a CollectivePermute of `size` bytes from each source to its target.

        Each message goes along the first dimension, then the second, ..., the shorter way around a ring, half of it
        each way if both are equal. The busiest link decides.
        """
        if not pairs:
            return 0.0
        at, ends = (self._coordinates(devices)[1:] for devices in zip(*pairs))
        busiest = 0.0
        for dimension, chips in enumerate(self.chips):
            load = np.zeros((2, *self.chips))
            ahead = (ends[dimension] - at[dimension]) % chips
            ways = ((ahead, 1), (chips - ahead, -1)) if chips > 2 else ((ahead, 1),)  # two chips have one link
            for way, (hops, step) in enumerate(ways):
                share = np.where(2 * hops < chips, 1.0, np.where(2 * hops == chips, 1.0 / len(ways), 0.0))
                for hop in range(chips // 2):
                    here = at.copy()
                    here[dimension] = (at[dimension] + step * hop) % chips
                    np.add.at(load[way], tuple(here), share * (hop < hops) * (ahead > 0))
            at[dimension] = ends[dimension]
            busiest = max(busiest, float(load.max()))
        return busiest * size / self.generation.link_bandwidth

    def _spans(self, group: Sequence[int]) -> list[_Span]:
        """Returns the span of a group in a chip, then along each dimension of the torus."""
        found = [np.unique(along) for along in self._coordinates(group)]
        spacing = [int(np.diff(positions).min()) if len(positions) > 1 else 1 for positions in found]
        return [_Span(len(positions), *each) for positions, *each in zip(found, spacing, self._sizes)]

    def _coordinates(self, devices: Sequence[int]) -> np.ndarray:
        """Returns [dimensions, devices]: the core in its chip, then the chip's position along each dimension."""
        return np.array(np.unravel_index(np.asarray(devices), self._sizes, order="F"))

    @property
    def _sizes(self) -> tuple[int, ...]:
        return (self.generation.cores_per_chip, *self.chips)


def links_of(target: Slice | Cluster) -> Torus | Network:
    """Returns the links of a slice's cores or a cluster's GPUs."""
    return Torus(GENERATIONS[target.generation], target.chips) if isinstance(target, Slice) else Network(target)
