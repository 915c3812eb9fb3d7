"""Pooling of images and volumes; see `windows` for its sharding."""

from __future__ import annotations

import dataclasses

import numpy as np

from lingvo_moe.errors import UserError
from lingvo_moe.layers.base import Context
from lingvo_moe.layers.images.windows import SPATIAL_AXES, WindowedLayer
from lingvo_moe.lazy import tf


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Pooling(WindowedLayer):
    """A reduction of each window, of its elements that are no padding; there must be one."""

    def __post_init__(self):
        super().__post_init__()
        if any(max(pair) >= size for pair, size in zip(self.explicit_padding, self.window)):
            raise UserError(
                f"{type(self).__name__}: padding is {self.padding}, but windows are {self.window}; a window of padding "
                f"alone has no value. Use less padding than a window has elements."
            )

    def weights(self) -> dict:
        """See `Layer.weights`."""
        return {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaxPooling(_Pooling):
    """The largest element of each window, by channel; padding is never the largest."""

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
class AveragePooling(_Pooling):
    """The mean of each window, by channel, of its elements that are no padding."""

    def __call__(self, theta: dict, inputs: tf.Tensor, context: Context) -> tf.Tensor:
        """`[B, X, Y(, Z), I]` to `[B, X', Y'(, Z'), I]`; raises UserError, see `check_input`."""
        del theta
        self.check_input(inputs, context)
        pool = tf.nn.avg_pool2d if self.rank == 2 else tf.nn.avg_pool3d
        padded, padding = self._padded(inputs)
        outputs = pool(padded, (1, *self.window, 1), (1, *self.strides, 1), padding)
        self.check_partitions(outputs, context)
        return self._without_padding(outputs, tuple(inputs.shape[1:-1])) if self._has_explicit_padding else outputs

    def _without_padding(self, means: tf.Tensor, sizes: tuple[int, ...]) -> tf.Tensor:
        """Divides means, in which explicit padding counts as zeros, by the part of each window that is no padding."""
        for axis, (size, (low, _)) in enumerate(zip(sizes, self.explicit_padding)):
            starts = np.arange(means.shape[1 + axis]) * self.strides[axis] - low
            inside = np.minimum(starts + self.window[axis], size) - np.maximum(starts, 0)
            shape = [-1 if other == axis else 1 for other in range(self.rank)]
            means *= tf.constant((self.window[axis] / inside).reshape(1, *shape, 1), means.dtype)
        return means
