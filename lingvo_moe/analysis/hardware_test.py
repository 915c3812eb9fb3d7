"""Protects the model of the links: AllReduce is O(1) in the number of cores, AllToAll O(sqrt) (GShard 5.3)."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings, strategies

from lingvo_moe.analysis.collectives import COLLECTIVES
from lingvo_moe.analysis.hardware import GENERATIONS, Network, Torus
from lingvo_moe.engines import topology
from lingvo_moe.engines.cluster import Cluster

V3 = GENERATIONS["v3"]
MIB = 2**20
GROUPED = [kind for kind in COLLECTIVES if kind != "collective-permute"]


def square(side: int) -> Torus:
    return Torus(V3, (side, side, 1))


def test_every_generation_of_the_compiler_has_figures():
    """`plan` knows the clock and the links of every slice that it compiles for."""
    assert GENERATIONS.keys() == topology.GENERATIONS.keys()


@pytest.mark.parametrize("generation", GENERATIONS.values(), ids=GENERATIONS)
def test_figures_have_the_units_that_they_are_declared_in(generation):
    """Of all generations, operations for each byte of memory, and the bandwidths, are of the same order."""
    assert 60 <= generation.peak_flops / generation.memory_bandwidth <= 600
    assert 4 <= generation.memory_bandwidth / generation.link_bandwidth <= 40
    assert 8e9 <= generation.memory < 256e9 and generation.memory % 2**30 == 0
    assert generation.clock is None or 5e8 <= generation.clock <= 2e9


def test_all_reduce_takes_the_same_time_on_any_slice():
    """GShard section 5.3; except for a device's own part, a smaller fraction on more devices."""
    times = [square(side).seconds("all-reduce", 8 * MIB, range(2 * side * side)) for side in (4, 8, 16, 32)]
    assert times == sorted(times) and times[-1] < times[0] * 16 / 15


@pytest.mark.parametrize("side", [4, 8, 16])
def test_all_to_all_takes_twice_the_time_on_four_times_the_cores(side):
    """GShard section 5.3: O(sqrt(D)) at equal bytes per core."""
    once, twice = (square(s).seconds("all-to-all", 8 * MIB, range(2 * s * s)) for s in (side, 2 * side))
    assert twice == pytest.approx(2 * once)


def test_all_to_all_is_bound_by_the_bisection():
    """Counted manually on 4x4 chips: 32 cores send half of 32 MiB to the other half, over 2 x 4 links."""
    crossing = 16 * 16 * MIB
    assert square(4).seconds("all-to-all", 32 * MIB, range(32)) == pytest.approx(crossing / (8 * V3.link_bandwidth))


def busiest_link(torus: Torus, messages: Iterable[tuple[int, int]]) -> float:
    """The bytes on the busiest link if one byte goes from each source to its target, devices numbered as in `Torus`.

    A message goes along x first and then along y, the shorter way around; half of it each way if both are equal.
    """
    cores, load = torus.generation.cores_per_chip, collections.Counter[tuple]()
    for source, target in messages:
        at, end = ([device // cores % torus.chips[0], device // cores // torus.chips[0]] for device in (source, target))
        for axis, size in enumerate(torus.chips[:2]):
            ahead = (end[axis] - at[axis]) % size
            both = ((1, ahead), (-1, size - ahead)) if size > 2 else ((1, ahead),)  # one link between two chips
            ways = [(step, length) for step, length in both if 2 * length <= size]
            for step, length in ways:
                for hop in range(length):
                    position = (at[axis] + step * hop) % size
                    load[(*at[:axis], position, *at[axis + 1 :], axis, step)] += 1 / len(ways)
            at[axis] = end[axis]
    return max(load.values(), default=0.0)


def groups_of(mesh: tuple[int, ...], axes: tuple[int, ...]) -> list[list[int]]:
    """All groups along these axes of a mesh of devices in row-major order."""
    devices = np.moveaxis(np.arange(math.prod(mesh)).reshape(mesh), axes, range(-len(axes), 0))
    return devices.reshape(-1, math.prod(mesh[axis] for axis in axes)).tolist()


@pytest.mark.parametrize(
    ("name", "chips", "mesh", "axes"),
    [
        *(("v3", chips, (2 * chips[0] * chips[1],), (0,)) for chips in [(4, 4), (4, 8), (8, 4), (8, 8)]),
        ("v3", (4, 4), (16, 2), (0,)),  # one core of each chip: the groups of both cores share the links
        ("v3", (4, 4), (16, 2), (1,)),
        ("v3", (4, 4), (4, 8), (0,)),
        ("v3", (4, 4), (4, 8), (1,)),
        ("v3", (8, 8), (8, 16), (0,)),
        ("v3", (8, 8), (4, 32), (0,)),  # every second row of chips: two groups share the rings along y
        ("v3", (8, 8), (32, 4), (0,)),
        ("v3", (4, 8), (2, 4, 8), (1,)),
        ("v3", (4, 8), (2, 4, 8), (0, 2)),  # axes that are not neighbours
        ("v5e", (8, 8), (2, 2, 2, 8), (0, 3)),
        ("v5e", (4, 4), (2, 8), (0,)),
        ("v5e", (16, 1), (2, 8), (0,)),  # eight pairs share a ring
        ("v5e", (16, 1), (4, 4), (0,)),
    ],
)
def test_all_to_all_takes_as_long_as_its_busiest_link(name, chips, mesh, axes):
    """Every message of all groups is routed on its own: an account that knows nothing of bisections."""
    torus = Torus(GENERATIONS[name], (*chips, 1))
    groups = groups_of(mesh, axes)
    busiest = busiest_link(torus, (pair for group in groups for pair in itertools.product(group, group)))
    seconds = torus.seconds("all-to-all", len(groups[0]) * MIB, groups[0])
    assert seconds == pytest.approx(busiest * MIB / torus.generation.link_bandwidth)


@settings(max_examples=50, deadline=None)
@given(
    strategies.sampled_from([("v3", (4, 4, 1)), ("v5e", (8, 3, 1)), ("v5e", (2, 6, 1))]),
    strategies.randoms(use_true_random=False),
    strategies.integers(0, 32),
)
def test_a_permute_takes_as_long_as_its_busiest_link(slice_, random, messages):
    """Any pairs, in which a device is a source and a target once at most."""
    torus = Torus(GENERATIONS[slice_[0]], slice_[1])
    devices = range(torus.generation.cores_per_chip * math.prod(torus.chips))
    shuffled = [random.sample(devices, len(devices)) for _ in range(2)]
    pairs = list(zip(*shuffled))[:messages]
    expected = busiest_link(torus, pairs) * MIB / torus.generation.link_bandwidth
    found = torus.permute_seconds(MIB, pairs)
    assert found == pytest.approx(expected) and type(found) is float  # NumPy's numbers are not JSON


@pytest.mark.parametrize(
    ("name", "chips", "kind", "group", "stride", "result", "busiest"),
    [
        # A ring of 8 chips: each needs the 7 MiB of the 7 others, half of it through the link from each side.
        ("v5e", (8, 1), "all-gather", 8, 1, 8, 3.5),
        # The way back: 7 MiB of sums for 7 others leave each chip through its two links; it keeps a sum of 1 MiB.
        ("v5e", (8, 1), "reduce-scatter", 8, 1, 1, 3.5),
        # A ReduceScatter of 8 MiB as above, then an AllGather of the sums as above.
        ("v5e", (8, 1), "all-reduce", 8, 1, 8, 7),
        # The ring is cut in two places: 4 chips send 4 x 1 MiB each to the other half, through 2 links.
        ("v5e", (8, 1), "all-to-all", 8, 1, 8, 8),
        # Half of that ring is a line: the chip at its end gets the 3 MiB of the others through one link.
        ("v5e", (8, 1), "all-gather", 4, 1, 4, 3),
        ("v5e", (8, 1), "reduce-scatter", 4, 1, 1, 3),
        ("v5e", (8, 1), "all-reduce", 4, 1, 4, 6),
        # The middle of the line is one link: 2 chips send 2 x 1 MiB each.
        ("v5e", (8, 1), "all-to-all", 4, 1, 4, 4),
        # Two chips have one link between them, not a ring of two links.
        ("v5e", (2, 2), "all-gather", 2, 1, 2, 1),
        # A torus of 4x4: 15 MiB come from 15 chips through 4 links, two along x and two along y.
        ("v5e", (4, 4), "all-gather", 16, 1, 16, 3.75),
        ("v5e", (4, 4), "reduce-scatter", 16, 1, 1, 3.75),
        ("v5e", (4, 4), "all-reduce", 16, 1, 16, 7.5),
        # Chips 0, 4, 8 and 12 are a ring along y: 3 MiB come through its 2 links at each.
        ("v5e", (4, 4), "all-gather", 4, 4, 4, 1.5),
        ("v5e", (4, 4), "reduce-scatter", 4, 4, 1, 1.5),
        ("v5e", (4, 4), "all-reduce", 4, 4, 4, 3),
        # Chips 0, 4, 8 and 12 of 4x8 are a line along y: one link at its end.
        ("v5e", (4, 8), "all-gather", 4, 4, 4, 3),
        # Half of 4x8: rings along x and lines along y, so the chips of an edge have 2 + 1 links for 15 MiB.
        ("v5e", (4, 8), "all-gather", 16, 1, 16, 5),
        # Two cores on each of 4x4 chips: 30 MiB are of the cores of other chips, and come once, for both.
        ("v3", (4, 4, 1), "all-gather", 32, 1, 32, 7.5),
        # The chip adds up what its own cores have of the 30 MiB before it sends it.
        ("v3", (4, 4, 1), "reduce-scatter", 32, 1, 1, 7.5),
        ("v3", (4, 4, 1), "all-reduce", 32, 1, 32, 15),
        # One core of each chip along x: chips 0 to 3, a ring, whose links the other cores' group uses as well.
        ("v3", (4, 4, 1), "all-gather", 4, 2, 4, 3),
        ("v3", (4, 4, 1), "reduce-scatter", 4, 2, 1, 3),
        ("v3", (4, 4, 1), "all-reduce", 4, 2, 4, 6),
        # Chips 0 and 4 of a ring of 8: each half of the MiB goes over 4 links, and so do those of three other pairs.
        ("v5e", (8, 1), "all-gather", 2, 4, 2, 2),
        # The two cores of one chip: no link.
        ("v3", (4, 4, 1), "all-reduce", 2, 1, 2, 0),
    ],
)
def test_seconds_are_those_of_the_busiest_link(name, chips, kind, group, stride, result, busiest):
    """MiB of a device's result, and MiB on the busiest link in one direction, both counted by hand: no formula."""
    generation = GENERATIONS[name]
    seconds = Torus(generation, chips).seconds(kind, result * MIB, range(0, group * stride, stride))
    assert seconds == pytest.approx(busiest * MIB / generation.link_bandwidth)


@pytest.mark.parametrize("kind", GROUPED)
def test_cores_of_one_chip_need_no_link(kind):
    """They communicate through the chip's memory."""
    assert square(4).seconds(kind, MIB, (0, 1)) == square(4).permute_seconds(MIB, [(0, 1), (1, 0)]) == 0


@pytest.mark.parametrize("kind", GROUPED)
@pytest.mark.parametrize("group", [range(8), range(0, 32, 8), range(32)])
def test_time_grows_with_bytes(kind, group):
    torus = square(4)
    once, twice = (torus.seconds(kind, size, group) for size in (MIB, 2 * MIB))
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
        # All of it comes from the GPU that has it: over NVLink in one node, else over an adapter.
        ("collective-broadcast", 8, 1, 8 * MIB / NVLINK),
        ("collective-broadcast", 32, 1, 32 * MIB / ADAPTER),
    ],
)
def test_collectives_of_gpus_take_the_slower_of_nvlink_and_network(kind, group, stride, seconds):
    """Counted manually for 4 nodes of 8 GPUs, and a MiB of results for each GPU of the group."""
    network = Network(Cluster("h100:4x8", "h100", 4, 8, ()))
    assert network.seconds(kind, group * MIB, range(0, group * stride, stride)) == pytest.approx(seconds)


def test_a_group_of_axes_that_are_not_neighbours_crosses_nodes():
    """GPUs 0, 1, 8 and 9 of two nodes: two adapters of a node share what the other two send; half of an AllToAll."""
    network = Network(Cluster("h100:2x8", "h100", 2, 8, ()))
    assert network.seconds("all-gather", 4 * MIB, (0, 1, 8, 9)) == pytest.approx(MIB / ADAPTER)
    assert network.seconds("all-to-all", 4 * MIB, (0, 1, 8, 9)) == pytest.approx(2 * MIB / ADAPTER)


@pytest.mark.parametrize(
    ("pairs", "seconds"),
    [
        ([(0, 1), (1, 0), (8, 9)], MIB / NVLINK),
        ([(0, 1), (7, 8)], MIB / ADAPTER),
        ([(0, 0), (9, 9)], 0),
        ([], 0),
    ],
)
def test_a_permute_of_gpus_needs_the_network_if_a_pair_is_of_two_nodes(pairs, seconds):
    assert Network(Cluster("h100:2x8", "h100", 2, 8, ())).permute_seconds(MIB, pairs) == pytest.approx(seconds)


@pytest.mark.parametrize("kind", GROUPED)
def test_every_collective_of_gpus_has_a_time(kind):
    assert Network(Cluster("h100:4x8", "h100", 4, 8, ())).seconds(kind, MIB, range(32)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v3:4x4x1", "v4:4x4x4", "v5e:8x4", "v6e:4x8"])
def test_devices_of_a_slice_are_where_the_torus_has_them(name):
    """Groups of a module are positions in the order that it was compiled for; JAX lists a slice host by host."""
    found = topology.Slice.of(name)
    torus = Torus(GENERATIONS[found.generation], (*found.chips, 1)[:3])
    expected = [[each.core_on_chip for each in found.devices], *zip(*(each.coords for each in found.devices))]
    np.testing.assert_array_equal(torus._coordinates(range(len(found.devices))), expected)
