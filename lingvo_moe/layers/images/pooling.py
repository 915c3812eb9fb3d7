"""Pooling of images and volumes; see `windows` for its sharding."""

from __future__ import annotations

import dataclasses

from lingvo_moe.errors import UserError
from lingvo_moe.layers.base import Context
from lingvo_moe.layers.images.windows import SPATIAL_AXES, WindowedLayer
from lingvo_moe.lazy import tf


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaxPooling(WindowedLayer):
    """The largest element of each window, by channel; padding is never the largest."""

    def weights(self) -> dict:
        """See `Layer.weights`."""
        return {}

    def __call__(self, theta: dict, inputs: tf.Tensor, context: Context) -> tf.Tensor:
        """`[B, X, Y(, Z), I]` to `[B, X', Y'(, Z'), I]`.

        Raises:
          UserError: see `check_input`; also windows of at least two strides along a sharded dimension, for which XLA's
            partitioner returns wrong gradients.
        """
        del theta
        self.check_input(inputs, context)
        self._check_overlap(context)
        padded, padding = self._padded(inputs, inputs.dtype.min)
        pool = tf.nn.max_pool2d if self.rank == 2 else tf.nn.max_pool3d
        outputs = pool(padded, (1, *self.window, 1), (1, *self.strides, 1), padding)
        self.check_partitions(outputs, context)
        return outputs

    def _check_overlap(self, context: Context):
        for axis, size, stride in zip(SPATIAL_AXES, self.window, self.strides):
            if size >= 2 * stride and size > 1 and context.layout.num_shards(self.axes, axis) > 1:
                raise UserError(
                    f"MaxPooling: windows of {size} with stride {stride} along {axis}, which devices share (mesh "
                    f"{context.layout.mesh}); XLA's partitioner returns wrong gradients for windows of two strides or "
                    f"more. Use windows below {2 * stride}, a larger stride, or AveragePooling."
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AveragePooling(WindowedLayer):
    """The mean of each window, by channel, of its elements that are no padding."""

    def __post_init__(self):
        super().__post_init__()
        if self._has_explicit_padding:
            raise UserError(f"AveragePooling: padding is {self.padding}; use SAME or VALID.")

    def weights(self) -> dict:
        """See `Layer.weights`."""
        return {}

    def __call__(self, theta: dict, inputs: tf.Tensor, context: Context) -> tf.Tensor:
        """`[B, X, Y(, Z), I]` to `[B, X', Y'(, Z'), I]`; raises UserError, see `check_input`."""
        del theta
        self.check_input(inputs, context)
        pool = tf.nn.avg_pool2d if self.rank == 2 else tf.nn.avg_pool3d
        outputs = pool(inputs, (1, *self.window, 1), (1, *self.strides, 1), self.padding)
        self.check_partitions(outputs, context)
        return outputs
