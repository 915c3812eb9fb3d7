"""Assignments are figure 10's, keep each row's devices together, and move communication without changing a value."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings, strategies

from lingvo_moe import device_assignment, sharding, testing
from lingvo_moe.layout import DeviceMesh, Layout
from lingvo_moe.lazy import tf

EIGHT = Layout.of(DeviceMesh((8,)))
FIGURE_10 = {"mesh": np.array([[0, 1, 5, 4], [2, 3, 7, 6]]), "tree": np.array([[0, 1, 2, 3], [4, 5, 6, 7]])}
ANNOTATIONS = {
    "shard": sharding.shard,
    "mesh_split": lambda tensor, assignment: sharding.mesh_split(tensor, assignment, [0, 1]),
}


@strategies.composite
def cases(draw) -> tuple[tuple[int, int], tuple[int, int]]:
    """A mesh of up to 8x8 devices, and as many partitions."""
    topology = draw(strategies.tuples(*[strategies.integers(1, 8)] * 2))
    size = topology[0] * topology[1]
    rows = draw(strategies.sampled_from([rows for rows in range(1, size + 1) if size % rows == 0]))
    return topology, (rows, size // rows)


def extent(row: np.ndarray, topology: tuple[int, int]) -> tuple[int, int]:
    """Height and width of the smallest rectangle of the mesh that holds a row's devices."""
    height, width = (int(np.ptp(places)) + 1 for places in np.divmod(row, topology[1]))
    return height, width


def test_figure_10():
    np.testing.assert_array_equal(device_assignment.for_mesh((2, 4), (2, 4)), FIGURE_10["mesh"])
    np.testing.assert_array_equal(device_assignment.for_tree(8, (2, 4)), FIGURE_10["tree"])


def test_figure_10_on_a_mesh():
    """The ring 0-1-5-4 has neighbours only; the row 0-1-2-3 is closed over three links."""
    assert device_assignment.longest_hop(FIGURE_10["mesh"], (2, 4)) == 1
    assert device_assignment.longest_hop(FIGURE_10["tree"], (2, 4)) == 3


@given(cases())
@settings(max_examples=200)
def test_every_device_holds_one_partition(case):
    topology, partitions = case
    for assignment in (device_assignment.for_mesh(topology, partitions),
                       device_assignment.for_tree(topology[0] * topology[1], partitions)):
        assert assignment.shape == partitions and np.issubdtype(assignment.dtype, np.integer)
        assert sorted(assignment.ravel()) == list(range(assignment.size))


@given(cases())
@settings(max_examples=200)
def test_rows_are_rectangles_of_neighbours(case):
    """Each row fills its rectangle from neighbour to neighbour, and where there is a ring, it is closed."""
    topology, partitions = case
    assignment = device_assignment.for_mesh(topology, partitions)
    extents = {extent(row, topology) for row in assignment}
    (height, width), = extents
    assert height * width == partitions[1]
    steps = np.abs(np.diff(np.stack(np.divmod(assignment, topology[1])), axis=-1)).sum(axis=0)
    assert (steps == 1).all()
    if min(height, width) > 1 and partitions[1] % 2 == 0:
        assert device_assignment.longest_hop(assignment, topology) == 1


@pytest.mark.parametrize("topology, columns, expected", [
    ((4, 4), 16, (4, 4)), ((4, 8), 8, (2, 4)), ((8, 4), 8, (2, 4)), ((3, 12), 9, (3, 3)), ((6, 6), 6, (2, 3)),
    ((3, 8), 4, (1, 4)), ((2, 8), 16, (2, 8)), ((1, 8), 4, (1, 4)), ((8, 1), 4, (4, 1)), ((2, 3), 1, (1, 1))])
def test_rectangles_are_as_square_as_the_mesh_allows(topology, columns, expected):
    """3x8 is not tiled by 2x2, so its rows of four lie in a line."""
    assignment = device_assignment.for_mesh(topology, (topology[0] * topology[1] // columns, columns))
    assert extent(assignment[0], topology) == expected


def test_rectangles_without_a_ring_are_walked_to_and_fro():
    assert device_assignment.for_mesh((3, 3), (1, 9)).tolist() == [[0, 1, 2, 5, 4, 3, 6, 7, 8]]
    assert device_assignment.for_mesh((1, 8), (2, 4)).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("annotation", ANNOTATIONS)
@pytest.mark.parametrize("topology", FIGURE_10)
def test_rows_communicate_among_their_own_devices(topology, annotation):
    """Each row of devices is a replica group; sums of whole numbers are the same in any order."""
    assignment = FIGURE_10[topology]
    inputs = {"x": np.random.default_rng(0).integers(-99, 99, (8, 16)).astype(np.float32)}

    def row_sums(inputs: dict) -> dict:
        return {"y": tf.reduce_sum(ANNOTATIONS[annotation](inputs["x"], assignment), axis=1)}

    executable = testing.compile_for(row_sums, inputs, EIGHT)
    groups = re.findall(r" all-reduce\(.*replica_groups={{([\d,{}]+)}}", executable.hlo())
    assert groups == ["},{".join(",".join(map(str, row)) for row in assignment)]
    np.testing.assert_array_equal(testing.arrays(executable(inputs))["y"],
                                  testing.run(lambda i: {"y": tf.reduce_sum(i["x"], axis=1)}, inputs)["y"])


@pytest.mark.parametrize("message, misuse", [
    (r"partitions \(2, 3\) are 6 in all, but topology \(2, 4\) has 8 devices",
     lambda: device_assignment.for_mesh((2, 4), (2, 3))),
    (r"partitions \(2, 4\) are 8 in all, but num_devices is 7", lambda: device_assignment.for_tree(7, (2, 4))),
    (r"topology is \(0, 4\)", lambda: device_assignment.for_mesh((0, 4), (2, 4))),
    (r"partitions is \(8,\); give two sizes", lambda: device_assignment.for_mesh((2, 4), (8,))),
    (r"partitions is \(-2, -4\)", lambda: device_assignment.for_tree(8, (-2, -4))),
    (r"topology is \(4,\)", lambda: device_assignment.longest_hop(FIGURE_10["mesh"], (4,))),
    (r"names device 4, but topology \(2, 2\) has devices 0 to 3",
     lambda: device_assignment.longest_hop(FIGURE_10["tree"], (2, 2))),
    (r"names device -1", lambda: device_assignment.longest_hop(np.array([[-1]]), (2, 4))),
    (r"shape \(8,\) and type int64", lambda: device_assignment.longest_hop(np.arange(8), (2, 4))),
    (r"type float64", lambda: device_assignment.longest_hop(np.zeros((1, 1)), (2, 4))),
    (r"shape \(0, 4\)", lambda: device_assignment.longest_hop(np.zeros((0, 4), int), (2, 4)))])
def test_misuse_is_an_error_that_names_it(message, misuse):
    with pytest.raises(ValueError, match=message):
        misuse()
