"""Tensors whose leading dimension is sharded over devices: the stages of a pipeline, the terms of a partial sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lingvo_moe.lazy import tf
from lingvo_moe.sharding import spmd
from lingvo_moe.sharding.layout import Layout


def map_shards(
    function: Callable[..., tf.Tensor], arguments: Sequence[tuple[tf.Tensor, str]], logical_axes: str, layout: Layout
) -> tf.Tensor:
    """Applies a function to each device's part of the leading dimension.

    The axis of that dimension is manual, the others stay automatic (GSPMD section 3.4): the partitioner would move
    parts between devices, as it does not know that each device reads its own.

    Args:
      function: of tensors with a device's part of the leading dimension, and complete other dimensions.
      arguments: tensors with equal leading dimensions, each with its logical axes.
      logical_axes: of the result.
      layout: shards the leading dimension.
    """
    devices = layout.mesh.devices
    own = [
        spmd.auto_to_manual_spmd_partition(tensor, devices, layout.dims_mapping(axes), manual_dim=0)
        for tensor, axes in arguments
    ]
    result = function(*own)
    shape = (arguments[0][0].shape[0], *result.shape[1:])
    return spmd.manual_to_auto_spmd_partition(result, devices, layout.dims_mapping(logical_axes), shape, manual_dim=0)


def pass_on(tensor: tf.Tensor) -> tf.Tensor:
    """Passes each part of the leading dimension on to the next position; the last one to the first."""
    # The partitioner knows this form, of two slices, for a CollectivePermute; not that of `tf.roll`.
    return tf.concat([tensor[-1:], tensor[:-1]], axis=0)


def pass_back(tensor: tf.Tensor) -> tf.Tensor:
    """Inverts `pass_on`."""
    return tf.concat([tensor[1:], tensor[:1]], axis=0)
