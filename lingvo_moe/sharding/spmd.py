"""Sharding annotations: replicate, split, shard, mesh_split, and the switch to manual partitioning and back.

GShard section 3.2 and appendix A.3, GSPMD section 3. An annotation changes neither the value nor the gradient nor the
logical shape of a tensor; it sets the sharding that XLA's SPMD partitioner uses. An eager tensor is not partitioned and
is returned unchanged; the two switches refuse it. This is the only module that creates XLA's sharding operators.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lingvo_moe.lazy import tf

_num_devices: contextvars.ContextVar[int | None] = contextvars.ContextVar("num_devices", default=None)

REPLICATED_DIMENSION = -1


@contextlib.contextmanager
def annotating_for(count: int) -> Iterator[None]:
    """Makes annotations that do not fit `count` devices errors inside the block; `program.lower` sets it."""
    token = _num_devices.set(count)
    try:
        yield
    finally:
        _num_devices.reset(token)


def replicate(tensor: tf.Tensor) -> tf.Tensor:
    """Annotates `tensor` as replicated on every device (GShard section 3.2)."""
    return _annotate(tensor, _sharding().Sharding.replicate(), ())


def split(tensor: tf.Tensor, split_dimension: int, num_partitions: int) -> tf.Tensor:
    """Annotates `tensor` as sharded along one dimension; partition i is on device i (GShard section 3.2).

    Args:
      tensor: of any rank >= 1; the dimension need not be a multiple of `num_partitions` (XLA pads the last partition).
      split_dimension: in [-rank, rank).
      num_partitions: >= 1, and a divisor of the number of devices. With fewer partitions than devices, the other
        devices hold copies.

    Raises:
      ValueError: a dimension out of range, or a number of partitions below 1, above the number of devices, or not a
        divisor of it.
    """
    rank = _rank(tensor)
    dimension = _dimension_in_range("split", "split_dimension", split_dimension, rank)
    if num_partitions < 1:
        raise ValueError(f"split: num_partitions is {num_partitions}; it must be at least 1.")
    _check_device_count("split", num_partitions)
    tiles = np.arange(num_partitions).reshape([num_partitions if d == dimension else 1 for d in range(rank)])
    return _annotate(tensor, _tiled("split", tiles), ())


def shard(tensor: tf.Tensor, device_assignment: np.ndarray) -> tf.Tensor:
    """Annotates `tensor` as sharded along several dimensions, with a device for each partition (GShard appendix A.3).

    Args:
      tensor: of rank R >= 1.
      device_assignment: integer array of rank R. Its shape is the number of partitions per dimension, its elements are
        the ids of the devices that hold them: a `[3, 16, 64]` tensor with a `[1, 2, 4]` assignment has eight partitions
        of `[3, 8, 16]`. Devices that it does not name hold copies, the same number of each partition.

    Raises:
      ValueError: a rank other than the tensor's, a repeated, negative or unknown device id, or a number of partitions
        above the number of devices or not a divisor of it.
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
    tensor: tf.Tensor,
    device_mesh: np.ndarray,
    dims_mapping: Sequence[int],
    unspecified_dims: Sequence[int] = (),
    outer_dims: int = 0,
    manual_axes: Sequence[int] = (),
) -> tf.Tensor:
    """Annotates `tensor` as sharded along the axes of a device mesh (GSPMD section 3.1).

    Args:
      tensor: of rank R >= 1.
      device_mesh: integer array of device ids; `dims_mapping` refers to its axes by number.
      dims_mapping: R integers. Entry d is the mesh axis that shards dimension d, or -1. Along a mesh axis that no
        dimension maps to, the tensor is replicated (partial tiling).
      unspecified_dims: dimensions that propagation may shard further (GSPMD section 3.5).
      outer_dims: the number of dimensions that vectorisation adds in front of the tensor; `dims_mapping` has them.
      manual_axes: mesh axes that are manual where the tensor is, see `auto_to_manual_spmd_partition`.

    Raises:
      ValueError: a mapping whose length is not the rank, an entry that is not a mesh axis, a mesh axis used twice, a
        repeated device id, an unspecified dimension that the tensor does not have, or a mesh of more or fewer devices
        than there are.
    """
    rank, mesh = _rank(tensor) + outer_dims, np.asarray(device_mesh)
    mapping = _check_dims_mapping(rank, mesh, dims_mapping)
    _check_device_ids("mesh_split", mesh)
    if mesh.size != (_num_devices.get() or mesh.size):
        raise ValueError(
            f"mesh_split: the device mesh of shape {mesh.shape} has {mesh.size} of the {_num_devices.get()} devices; "
            f"a mesh names each of them once, and a tensor is replicated along axes that nothing maps to."
        )
    open_dims = [_dimension_in_range("mesh_split", "unspecified_dims", d, rank) for d in unspecified_dims]
    return _annotate(tensor, mesh_sharding(mesh, mapping, manual_axes), open_dims)


def mesh_sharding(device_mesh: np.ndarray, dims_mapping: Sequence[int], manual_axes: Sequence[int] = ()):
    """Returns XLA's sharding of a tensor whose dimension d is sharded by mesh axis `dims_mapping[d]` (-1: by none)."""
    mapping = list(dims_mapping)
    if not manual_axes and all(axis == REPLICATED_DIMENSION for axis in mapping):
        return _sharding().Sharding.replicate()
    return _sharding().mesh_split_sharding(np.asarray(device_mesh), mapping, list(manual_axes))


def auto_to_manual_spmd_partition(
    tensor: tf.Tensor, device_mesh: np.ndarray, dims_mapping: Sequence[int], manual_dim: int | None = None
) -> tf.Tensor:
    """Switches to manual partitioning: returns this device's shard of `tensor` (GSPMD section 3.4).

    Args:
      tensor: of the full shape; a mesh axis must divide the dimension that it shards, as a shard has one static shape.
      device_mesh: as in `mesh_split`.
      dims_mapping: the sharding of the tensor, as in `mesh_split`.
      manual_dim: a dimension of the tensor, whose mesh axis becomes manual while the others stay automatic: operators
        are partitioned over these, and annotations name the manual one, see `mesh_split`. None for all axes.

    Returns:
      A tensor of the shard's shape, or with `manual_dim` the shard's along this dimension alone. Operators on it are
      not partitioned over manual axes; each device runs them as written.

    Raises:
      ValueError: as `mesh_split`; also a dimension that its mesh axis does not divide, or an eager tensor.
    """
    _refuse_eager("auto_to_manual_spmd_partition")
    mesh = np.asarray(device_mesh)
    mapping = _check_dims_mapping(_rank(tensor), mesh, dims_mapping)
    dimension = _manual_dim("auto_to_manual_spmd_partition", manual_dim, mapping)
    shard_shape(tuple(tensor.shape), mesh, _manual_part(mapping, dimension))
    tensor = mesh_split(tensor, mesh, mapping)
    return _xla().spmd_full_to_shard_shape(
        tensor, manual_sharding=_serialized(mesh_sharding(mesh, mapping)), dim=dimension, unspecified_dims=[]
    )


def manual_to_auto_spmd_partition(
    tensor: tf.Tensor,
    device_mesh: np.ndarray,
    dims_mapping: Sequence[int],
    full_shape: Sequence[int],
    manual_dim: int | None = None,
) -> tf.Tensor:
    """Switches back to automatic partitioning: the shards of all devices become a tensor (GSPMD section 3.4).

    Args:
      tensor: this device's shard.
      device_mesh: as in `mesh_split`.
      dims_mapping: the sharding of the result, as in `mesh_split`.
      full_shape: of the result.
      manual_dim: the dimension whose mesh axis alone is manual; None for all axes.

    Raises:
      ValueError: as `auto_to_manual_spmd_partition`; also a tensor whose shape is not that of a shard of `full_shape`.
    """
    _refuse_eager("manual_to_auto_spmd_partition")
    mesh = np.asarray(device_mesh)
    mapping = _check_dims_mapping(len(full_shape), mesh, dims_mapping)
    dimension = _manual_dim("manual_to_auto_spmd_partition", manual_dim, mapping)
    expected = shard_shape(tuple(full_shape), mesh, _manual_part(mapping, dimension))
    if tuple(tensor.shape) != expected:
        raise ValueError(
            f"manual_to_auto_spmd_partition: the tensor has shape {tuple(tensor.shape)}, but a shard of "
            f"{tuple(full_shape)} over {mesh.shape} by {mapping} has shape {expected}."
        )
    full = _xla().spmd_shard_to_full_shape(
        tensor,
        manual_sharding=_serialized(mesh_sharding(mesh, mapping)),
        full_shape=list(full_shape),
        dim=dimension,
        unspecified_dims=[],
    )
    return mesh_split(full, mesh, mapping)


def shard_shape(shape: tuple[int, ...], device_mesh: np.ndarray, dims_mapping: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of one shard; raises ValueError where a mesh axis does not divide its dimension."""
    counts = [1 if axis == REPLICATED_DIMENSION else device_mesh.shape[axis] for axis in dims_mapping]
    for dimension, (size, count) in enumerate(zip(shape, counts)):
        if size % count:
            raise ValueError(
                f"dimension {dimension} of shape {shape} has {size} elements, which {count} devices do not "
                f"divide; manual partitioning needs equal shards."
            )
    return tuple(size // count for size, count in zip(shape, counts))


def _manual_dim(function: str, manual_dim: int | None, mapping: Sequence[int]) -> int:
    """The dimension that alone is manual, -1 for all."""
    if manual_dim is None:
        return REPLICATED_DIMENSION
    dimension = _dimension_in_range(function, "manual_dim", manual_dim, len(mapping))
    if mapping[dimension] == REPLICATED_DIMENSION:
        raise ValueError(
            f"{function}: manual_dim is {manual_dim}, but no mesh axis shards it by dims_mapping {list(mapping)}; name "
            f"a dimension that one shards."
        )
    return dimension


def _manual_part(mapping: Sequence[int], dimension: int) -> list[int]:
    """The part of a mapping that manual partitioning divides; the rest stays automatic."""
    if dimension == REPLICATED_DIMENSION:
        return list(mapping)
    return [axis if d == dimension else REPLICATED_DIMENSION for d, axis in enumerate(mapping)]


def _annotate(tensor: tf.Tensor, sharding, unspecified_dims: Sequence[int]) -> tf.Tensor:
    if tf.executing_eagerly():
        return tensor
    return _xla().sharding(tensor, sharding=_serialized(sharding), unspecified_dims=list(unspecified_dims))


def _serialized(sharding) -> Any:
    return sharding.proto.SerializeToString()


def _tiled(function: str, devices: np.ndarray):
    """Returns a tiling by device ids. It covers all devices: those that `devices` does not name hold copies, evenly."""
    available = _num_devices.get() or devices.size
    copies, rest = divmod(available, devices.size)
    if rest:
        raise ValueError(
            f"{function}: {devices.size} partitions asked for, which do not divide the {available} devices; the "
            f"other devices hold copies, the same number of each partition."
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
    from tensorflow.compiler.tf2xla.python import xla  # also registers the gradients of the sharding operators

    return xla


def _rank(tensor: tf.Tensor) -> int:
    rank = tf.TensorShape(tensor.shape).rank  # of a NumPy array as well
    if rank is None:
        raise ValueError("a tensor of unknown rank cannot be annotated; programs have static shapes.")
    return rank


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
                f"dims_mapping {mapping} uses mesh axis {axis} for two dimensions; one axis can shard one "
                f"dimension of a tensor only."
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
