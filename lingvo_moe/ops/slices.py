"""Updates of slices in place."""

from __future__ import annotations

from lingvo_moe.lazy import tf


def dynamic_update_slice(tensor: tf.Tensor, update: tf.Tensor, start: list | tf.Tensor) -> tf.Tensor:
    """Returns `tensor` with the slice that begins at `start` replaced by `update`; only in compiled programs.

    `start` is a list of numbers and scalars, or a tensor `[rank] int32`.
    """
    from tensorflow.compiler.tf2xla.python import xla  # TensorFlow's own slice updates become scatters

    if isinstance(start, list):
        start = tf.stack([tf.cast(index, tf.int32) for index in start])
    return xla.dynamic_update_slice(tensor, update, start)


def dynamic_slice(tensor: tf.Tensor, start: tf.Tensor, sizes: list[int]) -> tf.Tensor:
    """Returns the slice of `tensor` of `sizes` that begins at `start [rank] int32`; only in compiled programs."""
    from tensorflow.compiler.tf2xla.python import xla

    return xla.dynamic_slice(tensor, start, sizes)
