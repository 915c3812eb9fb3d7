"""Device assignments: which device of a topology holds which partition of a matrix (GShard appendix A.3, figure 10).

A matrix is cut into `[P, Q]` partitions that exchange data along its rows. An assignment is the `[P, Q]` integer array
of device ids that `sharding.shard` takes, and `sharding.mesh_split` as its device mesh; a good one keeps the devices of
each row close together. Any order of the devices gives the same values: it decides only how far data travels.
"""

from __future__ import annotations

import numpy as np


def for_mesh(topology: tuple[int, int], partitions: tuple[int, int]) -> np.ndarray:
    """Assigns the partitions of a matrix to a two-dimensional mesh of devices (figure 10, left).

    Each row of the matrix gets a rectangle of the mesh, as square as those that tile the mesh can be, and walks it as a
    closed ring of neighbours. Rectangles of one device's width or of an odd number of devices have no such ring: they
    are walked to and fro, and only the way back to the first device is longer.

    Args:
      topology: rows and columns of the mesh; devices are numbered in row-major order.
      partitions: rows and columns of partitions, `(P, Q)`.

    Returns:
      `[P, Q] int64` device ids, each exactly once: `[[0, 1, 5, 4], [2, 3, 7, 6]]` for 2x4 partitions on a 2x4 mesh.

    Raises:
      ValueError: a size below 1, or another number of partitions than of devices.
    """
    _check_sizes("topology", topology)
    _check_sizes("partitions", partitions)
    _check_as_many(partitions, int(np.prod(topology)), f"topology {topology} has {np.prod(topology)} devices")
    height, width = _rectangle(topology, partitions[1])
    devices = np.arange(np.prod(topology)).reshape(topology[0] // height, height, topology[1] // width, width)
    return np.stack([_ring(rectangle) for rectangle in devices.swapaxes(1, 2).reshape(-1, height, width)])


def for_tree(num_devices: int, partitions: tuple[int, int]) -> np.ndarray:
    """Assigns the partitions of a matrix to the leaves of a tree (figure 10, right).

    Consecutive devices share the most of their way to the root, so each row gets consecutive devices.

    Args:
      num_devices: the leaves, numbered from left to right.
      partitions: rows and columns of partitions, `(P, Q)`.

    Returns:
      `[P, Q] int64` device ids, each exactly once: `[[0, 1, 2, 3], [4, 5, 6, 7]]` for 2x4 partitions on 8 devices.

    Raises:
      ValueError: a size below 1, or another number of partitions than of devices.
    """
    _check_sizes("partitions", partitions)
    _check_as_many(partitions, num_devices, f"num_devices is {num_devices}")
    return np.arange(num_devices).reshape(partitions)


def longest_hop(assignment: np.ndarray, topology: tuple[int, int]) -> int:
    """Returns the most links between two neighbours on a row's ring, the last and the first device among them.

    Args:
      assignment: `[P, Q]` device ids.
      topology: rows and columns of a mesh without links from edge to edge, devices numbered in row-major order.

    Raises:
      ValueError: an assignment that is no matrix of device ids, or one with a device outside of the mesh.
    """
    _check_sizes("topology", topology)
    assignment = np.asarray(assignment)
    if assignment.ndim != 2 or not assignment.size or not np.issubdtype(assignment.dtype, np.integer):
        raise ValueError(f"assignment has shape {assignment.shape} and type {assignment.dtype}; give a matrix of "
                         f"device ids.")
    outside = assignment[(assignment < 0) | (assignment >= np.prod(topology))]
    if outside.size:
        raise ValueError(f"assignment names device {outside[0]}, but topology {topology} has devices 0 to "
                         f"{np.prod(topology) - 1}.")
    places = np.stack(np.divmod(assignment, topology[1]))
    return int(np.abs(places - np.roll(places, -1, axis=-1)).sum(axis=0).max())


def _rectangle(topology: tuple[int, int], size: int) -> tuple[int, int]:
    """The most square rectangle that tiles the mesh, of two the wider; one does, as `size` divides the devices."""
    shapes = [(height, size // height) for height in range(1, size + 1)
              if size % height == 0 and topology[0] % height == 0 and topology[1] % (size // height) == 0]
    return min(shapes, key=lambda shape: (sum(shape), shape))


def _ring(devices: np.ndarray) -> np.ndarray:
    """A rectangle's devices in the order of a ring of neighbours, where there is one."""
    height, width = devices.shape
    if 1 in (height, width) or height % 2 and width % 2:
        return _to_and_fro(devices)
    if height % 2:
        return _ring(devices.T)
    return np.concatenate([devices[:1, 0], _to_and_fro(devices[:, 1:]), devices[:0:-1, 0]])


def _to_and_fro(devices: np.ndarray) -> np.ndarray:
    """Every other row from right to left."""
    return np.concatenate([row[::-1] if index % 2 else row for index, row in enumerate(devices)])


def _check_sizes(name: str, sizes: tuple[int, int]):
    if len(sizes) != 2 or min(sizes) < 1:
        raise ValueError(f"{name} is {sizes}; give two sizes, rows and columns, each at least 1.")


def _check_as_many(partitions: tuple[int, int], num_devices: int, found: str):
    if np.prod(partitions) != num_devices:
        raise ValueError(f"partitions {partitions} are {np.prod(partitions)} in all, but {found}; give as many "
                         f"partitions as devices.")
