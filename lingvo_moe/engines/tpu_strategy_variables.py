"""Distributed tensors of the TPUStrategy engine: every core holds its own part, and nothing holds the whole.

`TPUStrategy` itself puts a whole copy of each variable on every core. Here each core has a variable of its part alone, and
`TPUPartitionedInputV2` shows them to the program as one tensor; TensorFlow's TPU bridge turns reading and assigning that one
into reading and assigning each part on its own core.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lingvo_moe.engines.base import ShardedTensor
from lingvo_moe.errors import UserError
from lingvo_moe.lazy import tf
from lingvo_moe.sharding import spmd
from lingvo_moe.sharding.layout import Layout, Spec


@dataclasses.dataclass(frozen=True)
class Placement:
    """How a tensor is cut into one part for each core.

    Where a mesh axis cuts nothing of a tensor that another axis cuts, its parts have copies. The bridge loses count of copied
    results, so such a tensor is kept with a leading dimension, of the size of that axis, for its copies: `stored`.
    """

    spec: Spec
    layout: Layout

    def check(self, path: str):
        """Raises UserError where a mesh axis does not divide a dimension that it cuts."""
        mesh = self.layout.mesh
        for size, axis in zip(self.spec.shape, self._dims_mapping):
            if axis >= 0 and size % mesh.shape[axis]:
                raise UserError(
                    f"{path} {list(self.spec.shape)} has a dimension of {size}, which mesh axis "
                    f"{mesh.axis_names[axis]} of {mesh.shape[axis]} cores does not divide. Use a slice with a "
                    f"divisor of it, or change the size."
                )

    @property
    def replicated(self) -> bool:
        """Whether every core holds all of it."""
        return all(axis == spmd.REPLICATED_DIMENSION for axis in self._dims_mapping)

    @property
    def partition_dims(self) -> list[int]:
        """Into how many parts each dimension of the stored tensor is cut; empty for a replicated one."""
        shape = self.layout.mesh.shape
        return [] if self.replicated else [shape[axis] if axis >= 0 else 1 for axis in self._stored_mapping]

    @property
    def cores(self) -> list[int]:
        """The core of each part, in row-major order of parts."""
        devices = self.layout.mesh.devices
        axes = [axis for axis in self._stored_mapping if axis >= 0]
        return (devices if self.replicated else devices.transpose(axes)).ravel().tolist()

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of one core's variable."""
        dims = self.partition_dims or [1] * len(self.spec.shape)
        return tuple(size // parts for size, parts in zip(self._stored_shape, dims, strict=True))

    def slices(self) -> list[tuple[slice, ...]]:
        """Of each part: where in the tensor it belongs; copies belong to the same place."""
        found = []
        for part in range(self.layout.mesh.size):
            where = np.unravel_index(part, self.partition_dims) if self.partition_dims else [0] * len(self.spec.shape)
            stored = [slice(at * size, (at + 1) * size) for at, size in zip(where, self.part_shape, strict=True)]
            found.append(tuple(stored[self._copy_dims :]))
        return found

    def stored(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor as it is kept, in place; no data moves."""
        if not self._copy_dims:
            return self.layout.annotate(tensor, self.spec.logical_axes) if self.layout.mesh.size > 1 else tensor
        mesh = self.layout.mesh.devices
        part = spmd.auto_to_manual_spmd_partition(tensor, mesh, self._dims_mapping)
        return spmd.manual_to_auto_spmd_partition(part[tf.newaxis], mesh, self._stored_mapping, self._stored_shape)

    def restored(self, tensor: tf.Tensor) -> tf.Tensor:
        """The inverse of `stored`."""
        if not self._copy_dims:
            return self.stored(tensor)
        mesh = self.layout.mesh.devices
        part = spmd.auto_to_manual_spmd_partition(tensor, mesh, self._stored_mapping)
        return spmd.manual_to_auto_spmd_partition(part[0], mesh, self._dims_mapping, self.spec.shape)

    def join(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        """One tensor, or handle of a variable, of those of all parts, for a TPU program to read."""
        from tensorflow.python.ops import gen_tpu_partition_ops  # TensorFlow exposes it under no public name

        joined = gen_tpu_partition_ops.tpu_partitioned_input_v2(parts, partition_dims=self.partition_dims)
        if self.layout.mesh.size > 1:
            spmd.mesh_sharding(self.layout.mesh.devices, self._stored_mapping).apply_to_tensor(joined)
        return joined

    @property
    def _dims_mapping(self) -> tuple[int, ...]:
        if self.layout.mesh.size == 1:
            return (spmd.REPLICATED_DIMENSION,) * len(self.spec.shape)
        return self.layout.dims_mapping(self.spec.logical_axes)

    @property
    def _copy_axes(self) -> tuple[int, ...]:
        if self.replicated:
            return ()
        return tuple(axis for axis in range(len(self.layout.mesh.shape)) if axis not in self._dims_mapping)

    @property
    def _copy_dims(self) -> int:
        return len(self._copy_axes)

    @property
    def _stored_mapping(self) -> tuple[int, ...]:
        return self._copy_axes + self._dims_mapping

    @property
    def _stored_shape(self) -> tuple[int, ...]:
        return tuple(self.layout.mesh.shape[axis] for axis in self._copy_axes) + self.spec.shape


class ShardedVariable(ShardedTensor):
    """A tensor of the training state, one variable on each core.

    `numpy.asarray` brings all of it here; `shards` does so shard by shard.
    """

    def __init__(self, placement: Placement, devices: Sequence[str], name: str):
        """Makes variables without values.

        Args:
          placement: how it is cut.
          devices: of all cores, by their number in the mesh.
          name: its path in the state.
        """
        from tensorflow.python.ops import (
            resource_variable_ops,
        )  # a variable without an initial value has no public name

        self.placement = placement
        self._variables = []
        for core in placement.cores:
            with tf.device(devices[core]):
                self._variables.append(
                    resource_variable_ops.UninitializedVariable(
                        shape=placement.part_shape, dtype=tf.as_dtype(placement.spec.dtype), trainable=False, name=name
                    )
                )

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""
        return self.placement.spec.shape

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Of what one core holds of it."""
        return tuple(s.stop - s.start for s in self.placement.slices()[0])

    @property
    def dtype(self) -> np.dtype:
        """Of its elements."""
        return np.dtype(self.placement.spec.dtype)

    def handle(self) -> tf.Tensor:
        """The variable as one, for `read` and `write` in a TPU program."""
        return self.placement.join([variable.handle for variable in self._variables])

    def read(self, handle: tf.Tensor) -> tf.Tensor:
        """Its value in a TPU program, in place."""
        return self.placement.restored(tf.raw_ops.ReadVariableOp(resource=handle, dtype=self.dtype))

    def write(self, handle: tf.Tensor, value: tf.Tensor):
        """Assigns a value in a TPU program."""
        tf.raw_ops.AssignVariableOp(resource=handle, value=self.placement.stored(value))

    def shards(self) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
        """Yields (index, value) of each shard once, one after another; `index` selects it in the whole tensor."""
        for where, copies in self._places():
            yield where, copies[0].read_value().numpy().reshape([s.stop - s.start for s in where])

    def load(self, value: Any):
        """Assigns each part from `value[where]`: an array, or anything that reads a part when it is asked for one.

        Raises:
          UserError: a value of another shape.
        """
        if tuple(value.shape) != self.shape:
            raise UserError(f"the value has shape {list(value.shape)}, the variable {list(self.shape)}.")
        for where, copies in self._places():
            _assign(copies, np.asarray(value[where], self.dtype).reshape(self.placement.part_shape))

    def _places(self) -> Iterator[tuple[tuple[slice, ...], list[Any]]]:
        """Yields where a part belongs and the variables that hold it, one or many."""
        places: dict[tuple, list[Any]] = {}
        for where, variable in zip(self.placement.slices(), self._variables, strict=True):
            places.setdefault(tuple((s.start, s.stop) for s in where), []).append(variable)
        for place, copies in places.items():
            yield tuple(slice(*ends) for ends in place), copies

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        whole = np.empty(self.shape, self.dtype)
        for where, part in self.shards():
            whole[where] = part
        return whole if dtype is None else whole.astype(dtype)


def _assign(copies: Sequence[Any], part: np.ndarray):
    """Gives variables one value, which goes to each host once and from there to those of its cores."""
    on_host: dict[str, tf.Tensor] = {}
    for variable in copies:
        host = tf.DeviceSpec.from_string(variable.device).replace(device_type="CPU", device_index=0).to_string()
        if host not in on_host:
            with tf.device(host):
                on_host[host] = tf.constant(part)
        with tf.device(variable.device):
            variable.assign(on_host[host], read_value=False)
