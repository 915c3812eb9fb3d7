"""Updates of slices in place."""

from __future__ import annotations

from lingvo_moe.lazy import tf


def dynamic_update_slice(tensor: tf.Tensor, update: tf.Tensor, start: list) -> tf.Tensor:
    """Returns `tensor` with the slice that begins at `start` replaced by `update`; only in compiled programs."""
    from tensorflow.compiler.tf2xla.python import xla  # TensorFlow's own slice updates become scatters

    return xla.dynamic_update_slice(tensor, update, tf.stack([tf.cast(index, tf.int32) for index in start]))
