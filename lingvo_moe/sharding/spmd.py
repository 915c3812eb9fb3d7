"""Sharding annotations: replicate, split, shard, mesh_split, and the switch to manual partitioning and back.

GShard section 3.2 and appendix A.3, GSPMD section 3. An annotation changes neither value nor gradient nor logical shape; it
tells XLA's SPMD partitioner where a tensor lives. Outside a compiled graph (eager tensors) there is nothing to partition and
the tensor is returned as it is. This is the only module that touches XLA's sharding operators.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence

import numpy as np

from lingvo_moe.lazy import tf

_num_devices: contextvars.ContextVar[int | None] = contextvars.ContextVar("num_devices", default=None)

REPLICATED_DIMENSION = -1


@contextlib.contextmanager
def num_devices(count: int) -> Iterator[None]:
    """While active, annotations that ask for more than `count` devices are errors; a Program sets it while tracing."""
    token = _num_devices.set(count)
    try:
        yield
    finally:
        _num_devices.reset(token)


def replicate(tensor: tf.Tensor) -> tf.Tensor:
    """Annotates `tensor` to be held whole by every device (GShard section 3.2)."""
    return _annotate(tensor, _sharding().Sharding.replicate(), ())


def split(tensor: tf.Tensor, split_dimension: int, num_partitions: int) -> tf.Tensor:
    """Annotates `tensor` to be cut along one dimension; partition i lives on device i (GShard section 3.2).

    Args:
      tensor: of any rank >= 1; the dimension need not be a multiple of `num_partitions` (XLA pads the last partition).
      split_dimension: in [-rank, rank).
      num_partitions: >= 1, at most the number of devices, and a divisor of it: with fewer, the other devices hold copies.

    Raises:
      ValueError: a dimension out of range, a partition count below 1, above the number of devices, or no divisor of it.
    """
    rank = _rank(tensor)
    dimension = _dimension_in_range("split", "split_dimension", split_dimension, rank)
    if num_partitions < 1:
        raise ValueError(f"split: num_partitions is {num_partitions}; it must be at least 1.")
    _check_device_count("split", num_partitions)
    tiles = np.arange(num_partitions).reshape([num_partitions if d == dimension else 1 for d in range(rank)])
    return _annotate(tensor, _tiled("split", tiles), ())


def shard(tensor: tf.Tensor, device_assignment: np.ndarray) -> tf.Tensor:
    """Annotates `tensor` to be cut along several dimensions, each partition on a named device (GShard appendix A.3).

    Args:
      tensor: of rank R >= 1.
      device_assignment: integer array of rank R. Its shape is the number of partitions per dimension, its elements the id
        of the device that holds each partition: a `[3, 16, 64]` tensor with a `[1, 2, 4]` assignment is cut into eight
        partitions of `[3, 8, 16]`. Devices that are not named hold copies, each partition as many.

    Raises:
      ValueError: a rank other than the tensor's, a repeated, negative or unknown device id, more partitions than devices, or
        a number of them that does not divide the devices.
    """
    devices = np.asarray(device_assignment)
    if devices.ndim != _rank(tensor):
        raise ValueError(
            f"shard: device_assignment has shape {devices.shape} (rank {devices.ndim}), but the tensor has shape "
            f"{tuple(tensor.shape)} (rank {_rank(tensor)}); give one number of partitions per dimension."
        )
    _check_device_ids("shard", devices)
    return _annotate(tensor, _tiled("shard", devices), ())


def mesh_split(
    tensor: tf.Tensor, device_mesh: np.ndarray, dims_mapping: Sequence[int], unspecified_dims: Sequence[int] = ()
) -> tf.Tensor:
    """Annotates `tensor` to be cut along the axes of a device mesh (GSPMD section 3.1).

    Args:
      tensor: of rank R >= 1.
      device_mesh: integer array of device ids; axis i of the mesh is what `dims_mapping` calls i.
      dims_mapping: R integers. Entry d is the mesh axis along which dimension d is cut, -1 where it is not cut. Mesh axes
        that nothing maps to hold copies (partial tiling).
      unspecified_dims: dimensions that the annotation leaves open: propagation may shard them further (GSPMD section 3.5).

    Raises:
      ValueError: a mapping of another length than the rank, an entry that is no mesh axis, a mesh axis used twice, a
        repeated device id, a mesh of more or fewer devices than there are.
    """
    rank, mesh = _rank(tensor), np.asarray(device_mesh)
    mapping = _check_dims_mapping(rank, mesh, dims_mapping)
    _check_device_ids("mesh_split", mesh)
    if mesh.size != (_num_devices.get() or mesh.size):
        raise ValueError(
            f"mesh_split: the device mesh of shape {mesh.shape} has {mesh.size} of the {_num_devices.get()} devices; "
            f"a mesh names each of them once, and axes that nothing maps to hold copies."
        )
    open_dims = [_dimension_in_range("mesh_split", "unspecified_dims", d, rank) for d in unspecified_dims]
    return _annotate(tensor, mesh_sharding(mesh, mapping), open_dims)


def mesh_sharding(device_mesh: np.ndarray, dims_mapping: Sequence[int]):
    """Returns XLA's sharding of a tensor whose dimension d lies along mesh axis `dims_mapping[d]` (-1: along none)."""
    mapping = list(dims_mapping)
    if all(axis == REPLICATED_DIMENSION for axis in mapping):
        return _sharding().Sharding.replicate()
    return _sharding().mesh_split_sharding(np.asarray(device_mesh), mapping)


def auto_to_manual_spmd_partition(tensor: tf.Tensor, device_mesh: np.ndarray, dims_mapping: Sequence[int]) -> tf.Tensor:
    """Leaves automatic partitioning: returns this device's own part of `tensor` (GSPMD section 3.4).

    Args:
      tensor: full shape; dimensions that are cut must be multiples of their mesh axis (a shard has one static shape).
      device_mesh, dims_mapping: where the tensor lives, as in `mesh_split`.

    Returns:
      A tensor of the shard's shape. Operators on it are not partitioned: they run per device as written.

    Raises:
      ValueError: as `mesh_split`; also a dimension that its mesh axis does not divide, or an eager tensor.
    """
    _refuse_eager("auto_to_manual_spmd_partition")
    mesh = np.asarray(device_mesh)
    mapping = _check_dims_mapping(_rank(tensor), mesh, dims_mapping)
    shard_shape(tuple(tensor.shape), mesh, mapping)
    tensor = mesh_split(tensor, mesh, mapping)
    return _xla().spmd_full_to_shard_shape(
        tensor, manual_sharding=mesh_sharding(mesh, mapping).proto.SerializeToString(), dim=-1, unspecified_dims=[]
    )


def manual_to_auto_spmd_partition(
    tensor: tf.Tensor, device_mesh: np.ndarray, dims_mapping: Sequence[int], full_shape: Sequence[int]
) -> tf.Tensor:
    """Returns to automatic partitioning: joins every device's part into a tensor of `full_shape` (GSPMD section 3.4).

    Raises:
      ValueError: as `auto_to_manual_spmd_partition`; also a tensor whose shape is not that of a shard of `full_shape`.
    """
    _refuse_eager("manual_to_auto_spmd_partition")
    mesh = np.asarray(device_mesh)
    mapping = _check_dims_mapping(len(full_shape), mesh, dims_mapping)
    expected = shard_shape(tuple(full_shape), mesh, mapping)
    if tuple(tensor.shape) != expected:
        raise ValueError(
            f"manual_to_auto_spmd_partition: the tensor has shape {tuple(tensor.shape)}, but a shard of "
            f"{tuple(full_shape)} over {mesh.shape} by {mapping} has shape {expected}."
        )
    full = _xla().spmd_shard_to_full_shape(
        tensor,
        manual_sharding=mesh_sharding(mesh, mapping).proto.SerializeToString(),
        full_shape=list(full_shape),
        dim=-1,
        unspecified_dims=[],
    )
    return mesh_split(full, mesh, mapping)


def shard_shape(shape: tuple[int, ...], device_mesh: np.ndarray, dims_mapping: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of one device's part; raises ValueError where a mesh axis does not divide its dimension."""
    parts = [1 if axis == REPLICATED_DIMENSION else device_mesh.shape[axis] for axis in dims_mapping]
    for dimension, (size, count) in enumerate(zip(shape, parts)):
        if size % count:
            raise ValueError(
                f"dimension {dimension} of shape {shape} has {size} elements, which {count} devices do not "
                f"divide; manual partitioning needs equal shards."
            )
    return tuple(size // count for size, count in zip(shape, parts))


def _annotate(tensor, sharding, unspecified_dims):
    if tf.executing_eagerly():
        return tensor
    return _xla().sharding(tensor, sharding=sharding.proto.SerializeToString(), unspecified_dims=list(unspecified_dims))


def _tiled(function: str, devices: np.ndarray):
    """A tiling by device ids. XLA's covers all devices, so those that are not named hold copies, evenly."""
    available = _num_devices.get() or devices.size
    copies, rest = divmod(available, devices.size)
    if rest:
        raise ValueError(
            f"{function}: {devices.size} partitions asked for, which do not divide the {available} devices; the "
            f"devices left over hold copies of the partitions, each as many."
        )
    if devices.size == 1:
        return _sharding().Sharding.replicate()
    if copies == 1:
        return _sharding().Sharding.tile(devices)
    others = np.setdiff1d(np.arange(available), devices).reshape(*devices.shape, copies - 1)
    return _sharding().Sharding.partial_tile(np.concatenate([devices[..., None], others], axis=-1))


def _sharding():
    from tensorflow.python.compiler.xla.experimental import xla_sharding  # TensorFlow exposes it under no public name

    return xla_sharding


def _xla():
    from tensorflow.compiler.tf2xla.python import xla  # registers the gradients of the sharding operators, too

    return xla


def _rank(tensor) -> int:
    if tensor.shape.rank is None:
        raise ValueError("a tensor of unknown rank cannot be annotated; programs have static shapes.")
    return tensor.shape.rank


def _dimension_in_range(function: str, argument: str, dimension: int, rank: int) -> int:
    if not -rank <= dimension < rank:
        raise ValueError(
            f"{function}: {argument} is {dimension}, but the tensor has rank {rank}; use -{rank} to {rank - 1}."
        )
    return dimension % rank


def _check_dims_mapping(rank: int, mesh: np.ndarray, dims_mapping: Sequence[int]) -> list[int]:
    mapping = list(dims_mapping)
    if len(mapping) != rank:
        raise ValueError(
            f"dims_mapping {mapping} has {len(mapping)} entries for a tensor of rank {rank}; give one mesh "
            f"axis (or -1) per dimension."
        )
    axes = [axis for axis in mapping if axis != REPLICATED_DIMENSION]
    for axis in axes:
        if not 0 <= axis < mesh.ndim:
            raise ValueError(
                f"dims_mapping {mapping} names mesh axis {axis}, but the device mesh of shape {mesh.shape} has "
                f"axes 0 to {mesh.ndim - 1} (-1: not sharded)."
            )
        if axes.count(axis) > 1:
            raise ValueError(
                f"dims_mapping {mapping} uses mesh axis {axis} for two dimensions; one axis can cut a tensor "
                f"along one dimension only."
            )
    return mapping


def _check_device_ids(function: str, devices: np.ndarray):
    if not np.issubdtype(devices.dtype, np.integer):
        raise ValueError(f"{function}: device ids must be integers, not {devices.dtype}.")
    if len(np.unique(devices)) != devices.size or devices.min() < 0:
        raise ValueError(f"{function}: device ids must be distinct and >= 0, got {devices.ravel().tolist()[:16]}.")
    _check_device_count(function, devices.size)
    available = _num_devices.get()
    if available is not None and devices.max() >= available:
        raise ValueError(
            f"{function}: device id {devices.max()} does not exist; there are {available} devices (0 to "
            f"{available - 1})."
        )


def _check_device_count(function: str, count: int):
    available = _num_devices.get()
    if available is not None and count > available:
        raise ValueError(
            f"{function}: {count} partitions asked for, but there are {available} devices; the number of "
            f"partitions must not exceed the number of devices."
        )


def _refuse_eager(function: str):
    if tf.executing_eagerly():
        raise ValueError(f"{function}: eager tensors are not partitioned; call it inside a program.")
