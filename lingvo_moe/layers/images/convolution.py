"""Convolutions of images and volumes, and transposed ones; see `windows` for their sharding."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lingvo_moe.errors import UserError
from lingvo_moe.layers.base import Context, Weight, matrix
from lingvo_moe.layers.images.windows import SAME, WindowedLayer
from lingvo_moe.lazy import tf


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Kernel(WindowedLayer):
    """The fields and weights of both layers.

    Attributes:
      inputs, outputs: I and O, channels.
      dilations: the distance of two elements of a window along each dimension; empty: 1.
      bias: whether a number is added to each channel.
    """

    inputs: int
    outputs: int
    dilations: tuple[int, ...] = ()
    bias: bool = True

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "dilations", self.dilations or (1,) * self.rank)
        self._check_sizes("dilations", self.dilations)
        if self.rank == 3 and self.padding != SAME and self.dilations[1] != self.dilations[2]:
            raise UserError(
                f"{self._name}: dilations are {self.dilations}; with padding other than SAME, TensorFlow swaps "
                f"those of Y and Z when it infers the shape of a volume. Use equal ones, or SAME."
            )
        for name in ("inputs", "outputs"):
            if getattr(self, name) < 1:
                raise UserError(f"{self._name}: {name} is {getattr(self, name)}; it counts channels, from 1.")

    @property
    def extent(self) -> tuple[int, ...]:
        """See `WindowedLayer`."""
        return tuple((size - 1) * dilation + 1 for size, dilation in zip(self.window, self.dilations))

    def _weights(self, kernel: Weight) -> dict:
        return {"kernel": kernel} | ({"bias": Weight((self.outputs,), "o")} if self.bias else {})

    def _finish(self, outputs: tf.Tensor, theta: dict, context: Context) -> tf.Tensor:
        self.check_partitions(outputs, context)
        return outputs + context.cast(theta["bias"]) if self.bias else outputs

    def _check_reach(self, large: Sequence[int], small: Sequence[int], context: Context):
        """Raises UserError for windows that XLA's partitioner cannot compile where each device has one window.

        The images are `large` (a convolution's input), and each window of them is one element of `small`. To compute
        `large` from `small`, as a transposed convolution and the gradient of a convolution with respect to its input
        do, XLA inserts zeros between the elements of `small`. Where a device has one of these and needs others than its
        neighbours', it ends the process, or returns an error of its own.
        """
        for axis, size, windows, extent, stride in zip("XYZ", large, small, self.extent, self.strides):
            devices = context.layout.num_shards(self.axes, axis)
            if devices == 1 or windows > devices or stride == 1:
                continue
            low = max((windows - 1) * stride + extent - size, 0) // 2 if self.padding == SAME else 0
            of_device = -(-size // devices)
            starts = [device * of_device + low for device in range(devices)]
            left = max(device + (extent - 1 - start) // stride for device, start in enumerate(starts))
            right = max((start + of_device - 1) // stride - device for device, start in enumerate(starts))
            if max(left, right) > 1:
                raise UserError(
                    f"{self._name}: windows of {extent} with stride {stride} along {axis}, of which a device has one "
                    f"(mesh {context.layout.mesh}), overlap with those of other devices than its neighbours, and XLA "
                    f"cannot partition that. Use fewer devices for {axis}, larger images, or a smaller window."
                )

    @property
    def _spatial(self) -> str:
        """The logical axes of a kernel's window, which is never sharded."""
        return "xyz"[: self.rank]

    @property
    def _sizes(self) -> dict[str, int]:
        return dict(zip("XYZ", self.window))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Convolution(_Kernel):
    """A convolution in two or three dimensions.

    Attributes:
      groups: into which the channels are divided: outputs of a group depend on the group's inputs alone. As many groups
        as inputs make a depthwise convolution.
    """

    groups: int = 1

    def __post_init__(self):
        super().__post_init__()
        if self.groups < 1 or self.inputs % self.groups or self.outputs % self.groups:
            raise UserError(
                f"{self._name}: {self.groups} groups do not divide {self.inputs} inputs and {self.outputs} outputs."
            )

    def weights(self) -> dict:
        """See `Layer.weights`; the kernel is `[X, Y(, Z), inputs of a group, outputs]`."""
        sizes = {**self._sizes, "I": self.inputs // self.groups, "O": self.outputs}
        return self._weights(matrix(f"{self._spatial}io", fan_in=f"{self._spatial}i", **sizes))

    def __call__(self, theta: dict, inputs: tf.Tensor, context: Context) -> tf.Tensor:
        """`[B, X, Y(, Z), I]` to `[B, X', Y'(, Z'), O]`, of the dtype of activations.

        Raises:
          UserError: see `check_input`; also an output with fewer elements than devices, and windows as of
            `_check_reach`.
        """
        self.check_input(inputs, context)
        padded, padding = self._padded(context.cast(inputs))
        kernel = context.cast(theta["kernel"])
        if self.groups == self.inputs > 1:
            # A channel for each of its outputs, so that the operator has one output for each input.
            outputs = self._convolve(tf.repeat(padded, self.outputs // self.inputs, axis=-1), kernel, padding)
        else:
            pairs = zip(tf.split(padded, self.groups, axis=-1), tf.split(kernel, self.groups, axis=-1))
            outputs = tf.concat([self._convolve(part, of_part, padding) for part, of_part in pairs], axis=-1)
        self._check_reach(padded.shape[1:-1], outputs.shape[1:-1], context)
        return self._finish(outputs, theta, context)

    def _convolve(self, inputs: tf.Tensor, kernel: tf.Tensor, padding: str) -> tf.Tensor:
        """The convolution of one group, or of as many as there are inputs and outputs.

        XLA's partitioner gathers the images of an operator with other groups, so each group has its own.
        """
        convolve = tf.nn.conv2d if self.rank == 2 else tf.nn.conv3d
        strides, dilations = (1, *self.strides, 1), (1, *self.dilations, 1)
        return convolve(inputs, kernel, strides=strides, padding=padding, dilations=dilations)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransposedConvolution(_Kernel):
    """The gradient of a convolution with respect to its input.

    Each input adds a multiple of the kernel to a window of the output.

    With `SAME` an output has `stride` times the elements of the input. With `VALID` it has all elements that a window
    reaches; explicit padding is cut off from these.
    """

    def weights(self) -> dict:
        """See `Layer.weights`; the kernel is `[X, Y(, Z), outputs, inputs]`."""
        sizes = {**self._sizes, "O": self.outputs, "I": self.inputs}
        return self._weights(matrix(f"{self._spatial}oi", fan_in="i", **sizes))

    def __call__(self, theta: dict, inputs: tf.Tensor, context: Context) -> tf.Tensor:
        """`[B, X, Y(, Z), I]` to `[B, X', Y'(, Z'), O]`, of the dtype of activations.

        Raises:
          UserError: an image of another rank, of fewer elements than devices, or one that padding cuts off; also
            windows as of `_check_reach` and `_check_parts`.
        """
        self.check_rank(inputs)
        self.check_partitions(inputs, context)
        transposed = tf.nn.conv2d_transpose if self.rank == 2 else tf.nn.conv3d_transpose
        sizes = self._output_sizes(tuple(inputs.shape[1:-1]))
        self._check_reach(sizes, inputs.shape[1:-1], context)
        self._check_parts(inputs.shape[1:-1], context)
        outputs = transposed(
            context.cast(inputs),
            context.cast(theta["kernel"]),
            output_shape=(inputs.shape[0], *sizes, self.outputs),
            strides=(1, *self.strides, 1),
            padding="SAME" if self.padding == SAME else "VALID",
            dilations=(1, *self.dilations, 1),
        )
        return self._finish(self._cut(outputs), theta, context)

    def _check_parts(self, sizes: Sequence[int], context: Context):
        """Raises UserError where windows overlap and a device has no part of the image: its kernel gradient is wrong.

        XLA computes it so for some of these images with SAME padding.
        """
        for axis, size, extent, stride in zip("XYZ", sizes, self.extent, self.strides):
            devices = context.layout.num_shards(self.axes, axis)
            if 1 < stride < extent and (devices - 1) * -(-size // devices) >= size:
                raise UserError(
                    f"{self._name}: {size} elements along {axis} leave one of {devices} devices without any (mesh "
                    f"{context.layout.mesh}), and windows of {extent} with stride {stride} overlap; XLA computes wrong "
                    f"gradients for such kernels. Use fewer devices for {axis}, other images, or a window of {stride}."
                )

    def _output_sizes(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """The spatial sizes of an output, before explicit padding is cut off."""
        if self.padding == SAME:
            return tuple(size * stride for size, stride in zip(sizes, self.strides))
        return tuple((size - 1) * stride + extent for size, stride, extent in zip(sizes, self.strides, self.extent))

    def _cut(self, outputs: tf.Tensor) -> tf.Tensor:
        if not self._has_explicit_padding:
            return outputs
        for axis, size, (low, high) in zip("XYZ", outputs.shape[1:-1], self.explicit_padding):
            if low + high >= size:
                raise UserError(
                    f"{self._name}: padding cuts {low} + {high} of the {size} elements along {axis} off; nothing is "
                    f"left. Use less padding or larger images."
                )
        cuts = [slice(low, size - high) for size, (low, high) in zip(outputs.shape[1:-1], self.explicit_padding)]
        return outputs[(slice(None), *cuts)]
