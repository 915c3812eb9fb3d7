"""Sharded tensors of the TPUStrategy engine: every core holds its own shard, and nothing holds the whole tensor.

`TPUStrategy` itself replicates each variable on every core. Here each core has a variable of its shard alone, and
`TPUPartitionedInputV2` presents them to the program as one tensor. TensorFlow's TPU bridge turns reading and assigning
that tensor into reading and assigning each shard on its own core.
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
class TensorSharding:
    """How a tensor is divided into one shard for each core.

    If one mesh axis shards a tensor and another does not, the tensor's shards have copies. The bridge miscounts copied
    results, so such a tensor is stored with a leading dimension for its copies along each such axis: `stored`.
    """

    spec: Spec
    layout: Layout

    def check(self, path: str):
        """Raises UserError if a mesh axis does not divide a dimension that it shards."""
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
        """Whether every core holds the whole tensor."""
        return all(axis == spmd.REPLICATED_DIMENSION for axis in self._dims_mapping)

    @property
    def partition_dims(self) -> list[int]:
        """The number of shards along each dimension of the stored tensor; empty for a replicated one."""
        shape = self.layout.mesh.shape
        return [] if self.replicated else [shape[axis] if axis >= 0 else 1 for axis in self._stored_mapping]

    @property
    def cores(self) -> list[int]:
        """The core of each shard, in row-major order of shards."""
        devices = self.layout.mesh.devices
        axes = [axis for axis in self._stored_mapping if axis >= 0]
        return (devices if self.replicated else devices.transpose(axes)).ravel().tolist()

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of one core's variable."""
        dims = self.partition_dims or [1] * len(self.spec.shape)
        return tuple(size // count for size, count in zip(self._stored_shape, dims, strict=True))

    def slices(self) -> list[tuple[slice, ...]]:
        """Returns the index of each shard in the tensor; copies have the same index."""
        slices = []
        for shard in range(self.layout.mesh.size):
            grid = np.unravel_index(shard, self.partition_dims) if self.partition_dims else [0] * len(self.spec.shape)
            stored = [slice(at * size, (at + 1) * size) for at, size in zip(grid, self.shard_shape, strict=True)]
            slices.append(tuple(stored[self._copy_dims :]))
        return slices

    def stored(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the tensor as it is stored, on the same cores; no data moves."""
        if not self._copy_dims:
            return self.layout.annotate(tensor, self.spec.logical_axes) if self.layout.mesh.size > 1 else tensor
        mesh = self.layout.mesh.devices
        part = spmd.auto_to_manual_spmd_partition(tensor, mesh, self._dims_mapping)
        part = part[(tf.newaxis,) * self._copy_dims]
        return spmd.manual_to_auto_spmd_partition(part, mesh, self._stored_mapping, self._stored_shape)

    def restored(self, tensor: tf.Tensor) -> tf.Tensor:
        """Inverts `stored`."""
        if not self._copy_dims:
            return self.stored(tensor)
        mesh = self.layout.mesh.devices
        part = spmd.auto_to_manual_spmd_partition(tensor, mesh, self._stored_mapping)
        return spmd.manual_to_auto_spmd_partition(
            part[(0,) * self._copy_dims], mesh, self._dims_mapping, self.spec.shape
        )

    def join(self, shards: Sequence[tf.Tensor]) -> tf.Tensor:
        """Joins the tensors, or the handles of the variables, of all shards into one, for a TPU program to read."""
        from tensorflow.python.ops import gen_tpu_partition_ops  # TensorFlow exposes it under no public name

        joined = gen_tpu_partition_ops.tpu_partitioned_input_v2(list(shards), partition_dims=self.partition_dims)
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

    def __init__(self, sharding: TensorSharding, devices: Sequence[str], name: str):
        """Allocates variables without values.

        Args:
          sharding: how it is sharded.
          devices: the names of all cores, by their number in the mesh.
          name: its path in the state.
        """
        # A variable without an initial value has no public name.
        from tensorflow.python.ops import resource_variable_ops

        self.sharding = sharding
        self._variables = []
        for core in sharding.cores:
            with tf.device(devices[core]):
                self._variables.append(
                    resource_variable_ops.UninitializedVariable(
                        shape=sharding.shard_shape, dtype=tf.as_dtype(sharding.spec.dtype), trainable=False, name=name
                    )
                )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self.sharding.spec.shape

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of the shard that one core holds."""
        return tuple(s.stop - s.start for s in self.sharding.slices()[0])

    @property
    def dtype(self) -> np.dtype:
        """The type of the elements."""
        return np.dtype(self.sharding.spec.dtype)

    def handle(self) -> tf.Tensor:
        """Returns one handle of all shards, for `read` and `write` in a TPU program."""
        return self.sharding.join([variable.handle for variable in self._variables])

    def read(self, handle: tf.Tensor) -> tf.Tensor:
        """Returns its value in a TPU program, sharded as it is stored."""
        return self.sharding.restored(tf.raw_ops.ReadVariableOp(resource=handle, dtype=self.dtype))

    def write(self, handle: tf.Tensor, value: tf.Tensor):
        """Assigns a value in a TPU program."""
        tf.raw_ops.AssignVariableOp(resource=handle, value=self.sharding.stored(value))

    def shards(self) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
        """Yields (index, value) of each shard once, one after another; `index` selects it in the whole tensor."""
        for index, copies in self._copies():
            yield index, copies[0].read_value().numpy().reshape([s.stop - s.start for s in index])

    def load(self, value: Any):
        """Assigns each shard from `value[index]`, where `value` is an array or reads a shard when it is indexed.

        Raises:
          UserError: a value of another shape.
        """
        if tuple(value.shape) != self.shape:
            raise UserError(f"the value has shape {list(value.shape)}, the variable {list(self.shape)}.")
        for index, copies in self._copies():
            _assign(copies, np.asarray(value[index], self.dtype).reshape(self.sharding.shard_shape))

    def _copies(self) -> Iterator[tuple[tuple[slice, ...], list[Any]]]:
        """Yields the index of each shard and the variables that hold copies of it."""
        copies: dict[tuple, list[Any]] = {}
        for index, variable in zip(self.sharding.slices(), self._variables, strict=True):
            copies.setdefault(tuple((s.start, s.stop) for s in index), []).append(variable)
        for bounds, variables in copies.items():
            yield tuple(slice(*ends) for ends in bounds), variables

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        whole = np.empty(self.shape, self.dtype)
        for index, shard in self.shards():
            whole[index] = shard
        return whole if dtype is None else whole.astype(dtype)


def _assign(copies: Sequence[Any], shard: np.ndarray):
    """Assigns one value to several variables; it is sent to each host once, and from there to its cores."""
    on_host: dict[str, tf.Tensor] = {}
    for variable in copies:
        host = tf.DeviceSpec.from_string(variable.device).replace(device_type="CPU", device_index=0).to_string()
        if host not in on_host:
            with tf.device(host):
                on_host[host] = tf.constant(shard)
        with tf.device(variable.device):
            variable.assign(on_host[host], read_value=False)
