"""Protects the model of the links: AllReduce is O(1) in the number of cores, AllToAll O(sqrt) (GShard 5.3)."""

from __future__ import annotations

import collections
import math

import numpy as np
import pytest

from lingvo_moe.analysis.collectives import COLLECTIVES
from lingvo_moe.analysis.hardware import GENERATIONS, Network, Torus
from lingvo_moe.engines import topology
from lingvo_moe.engines.cluster import Cluster

V3 = GENERATIONS["v3"]
MIB = 2**20


def square(side: int) -> Torus:
    return Torus(V3, (side, side, 1))


def test_every_generation_of_the_compiler_has_figures():
    """`plan` knows the clock and the links of every slice that it compiles for."""
    assert GENERATIONS.keys() == topology.GENERATIONS.keys()


def test_all_reduce_takes_the_same_time_on_any_slice():
    """GShard section 5.3; except for a device's own part, a smaller fraction on more devices."""
    times = [square(side).seconds("all-reduce", 8 * MIB, 2 * side * side, 1) for side in (4, 8, 16, 32)]
    assert times == sorted(times) and times[-1] < times[0] * 16 / 15


@pytest.mark.parametrize("side", [4, 8, 16])
def test_all_to_all_takes_twice_the_time_on_four_times_the_cores(side):
    """GShard section 5.3: O(sqrt(D)) at equal bytes per core."""
    once, twice = (square(s).seconds("all-to-all", 8 * MIB, 2 * s * s, 1) for s in (side, 2 * side))
    assert twice == pytest.approx(2 * once)


def test_all_to_all_is_bound_by_the_bisection():
    """Counted manually on 4x4 chips: 32 cores send half of 32 MiB to the other half, over 2 x 4 links."""
    crossing = 16 * 16 * MIB
    assert square(4).seconds("all-to-all", 32 * MIB, 32, 1) == pytest.approx(crossing / (8 * V3.link_bandwidth))


def busiest_link(chips: tuple[int, int]) -> float:
    """The bytes on the busiest link of a torus if every chip sends one byte to each chip, itself included.

    A message goes along x first and then along y, the shorter way around; half of it each way if both are equal.
    """
    load: collections.Counter[tuple] = collections.Counter()
    for start in np.ndindex(chips):
        for end in np.ndindex(chips):
            at = list(start)
            for axis, size in enumerate(chips):
                ahead = (end[axis] - at[axis]) % size
                ways = [(step, length) for step, length in ((1, ahead), (-1, size - ahead)) if 2 * length <= size]
                for step, length in ways:
                    for hop in range(length):
                        position = (at[axis] + step * hop) % size
                        load[(*at[:axis], position, *at[axis + 1 :], axis, step)] += 1 / len(ways)
                at[axis] = end[axis]
    return max(load.values())


@pytest.mark.parametrize("chips", [(4, 4), (4, 8), (8, 4), (8, 8)])
def test_all_to_all_takes_as_long_as_its_busiest_link(chips):
    """Every message is routed on its own: an account that knows nothing of bisections."""
    cores = 2 * chips[0] * chips[1]
    per_pair = 32 * MIB / cores * 4  # two cores send to two cores
    expected = busiest_link(chips) * per_pair / V3.link_bandwidth
    assert Torus(V3, (*chips, 1)).seconds("all-to-all", 32 * MIB, cores, 1) == pytest.approx(expected)


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_cores_of_one_chip_need_no_link(kind):
    """They communicate through the chip's memory."""
    assert square(4).seconds(kind, MIB, 2, 1) == 0


@pytest.mark.parametrize(
    "group, stride, extents",
    [
        (32, 1, (4, 4, 1)),
        (8, 1, (4, 1, 1)),
        (4, 8, (1, 4, 1)),
        (4, 1, (2, 1, 1)),
        (2, 1, (1, 1, 1)),
        (16, 2, (4, 4, 1)),
        (2, 16, (1, 2, 1)),
    ],
)
def test_extents_of_groups(group, stride, extents):
    """Devices are numbered core by core, then along x, then along y."""
    assert square(4)._extents(group, stride) == extents


@pytest.mark.parametrize("kind", COLLECTIVES)
@pytest.mark.parametrize("group, stride", [(8, 1), (4, 8), (32, 1)])
def test_time_grows_with_bytes_and_falls_with_bandwidth(kind, group, stride):
    torus = square(4)
    once, twice = (torus.seconds(kind, size, group, stride) for size in (MIB, 2 * MIB))
    assert once > 0 and math.isclose(twice, 2 * once)


NVLINK, ADAPTER = 450e9, 50e9  # bytes per second of an H100


@pytest.mark.parametrize(
    ("kind", "group", "stride", "seconds"),
    [
        # Of 8 MiB of results, 7 come from the node's other GPUs.
        ("all-to-all", 8, 1, 7 * MIB / NVLINK),
        # Of 32 MiB, 24 come from the other nodes.
        ("all-to-all", 32, 1, 24 * MIB / ADAPTER),
        # One GPU of each node: all but its own part comes over the network.
        ("all-to-all", 4, 8, 3 * MIB / ADAPTER),
        # Two GPUs of each node: their adapters share what comes from the other three nodes.
        ("all-gather", 8, 4, 8 * MIB * (3 / 4) / 2 / ADAPTER),
        ("all-reduce", 8, 1, 2 * 7 * MIB / NVLINK),
        # All eight adapters of a node share the network's part, so NVLink is slower: it moves all but an eighth.
        ("all-gather", 32, 1, 32 * MIB * (7 / 8) / NVLINK),
        ("all-reduce", 32, 1, 2 * 32 * MIB * (7 / 8) / NVLINK),
        # The result is a 32nd of what is reduced.
        ("reduce-scatter", 32, 1, 32 * 32 * MIB * (7 / 8) / NVLINK),
        ("collective-permute", 8, 1, 8 * MIB / NVLINK),
        ("collective-permute", 32, 1, 32 * MIB / ADAPTER),
    ],
)
def test_collectives_of_gpus_take_the_slower_of_nvlink_and_network(kind, group, stride, seconds):
    """Counted manually for 4 nodes of 8 GPUs, and a MiB of results for each GPU of the group."""
    network = Network(Cluster("h100:4x8", "h100", 4, 8, ()))
    assert network.seconds(kind, group * MIB, group, stride) == pytest.approx(seconds)


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_every_collective_of_gpus_has_a_time(kind):
    assert Network(Cluster("h100:4x8", "h100", 4, 8, ())).seconds(kind, MIB, 32, 1) > 0
