"""What convolutions and pooling of images and volumes share: their windows, and checks of the images.

Images are `[B, X, Y, I]`, volumes `[B, X, Y, Z, I]`: the letters of GShard's table of operators. A layout may shard X,
Y and Z (spatial partitioning, GSPMD section 5.6). XLA's partitioner propagates the sharding of the input from layer to
layer, and devices exchange the halos that their windows read (section 4.3), so layers annotate nothing.
"""

from __future__ import annotations

import dataclasses

from lingvo_moe.errors import UserError
from lingvo_moe.layers.base import Context, Layer
from lingvo_moe.lazy import tf

SPATIAL_AXES = "XYZ"
SAME, VALID = "SAME", "VALID"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowedLayer(Layer):
    """A layer whose outputs depend on windows of its input.

    Attributes:
      window: the elements of a window along X and Y, or X, Y and Z.
      strides: the distance of two windows along each dimension; empty: 1.
      padding: `SAME` (as many windows as strides begin in the image), `VALID` (windows inside of the image), or the
        elements of padding along each dimension, as `((low, high), ...)`.
    """

    window: tuple[int, ...]
    strides: tuple[int, ...] = ()
    padding: str | tuple[tuple[int, int], ...] = SAME

    def __post_init__(self):
        if len(self.window) not in (2, 3):
            raise UserError(f"window is {self.window}; give a size for 2 dimensions, or for 3.")
        self._check_sizes("window", self.window)
        object.__setattr__(self, "strides", self.strides or (1,) * self.rank)
        self._check_sizes("strides", self.strides)
        self._check_padding()

    @property
    def rank(self) -> int:
        """The number of spatial dimensions: 2 or 3."""
        return len(self.window)

    @property
    def extent(self) -> tuple[int, ...]:
        """The elements of the input from a window's first to its last one, along each dimension."""
        return self.window

    @property
    def axes(self) -> str:
        """The logical axes of an input or output: `BXYi` or `BXYZi`; devices never share its channels."""
        return f"B{SPATIAL_AXES[: self.rank]}i"

    def check_input(self, inputs: tf.Tensor, context: Context):
        """Raises UserError for an image of another rank, too small for a window or for the devices."""
        self.check_rank(inputs)
        sizes = tuple(inputs.shape[1:-1])
        for axis, size, extent, (low, high) in zip(SPATIAL_AXES, sizes, self.extent, self.explicit_padding):
            if extent > size + low + high:
                padded = f" and {low} + {high} of padding" if low + high else ""
                raise UserError(
                    f"{self._name}: a window spans {extent} elements along {axis}, but the image has {size}{padded}. "
                    f"Use larger images, a smaller window or dilation, or fewer levels that halve the image."
                )
        self.check_partitions(inputs, context)

    def check_rank(self, inputs: tf.Tensor):
        """Raises UserError for an image of another rank than the windows."""
        if inputs.shape.rank != self.rank + 2:
            raise UserError(
                f"{self._name} has windows {self.window}, but its input has shape {tuple(inputs.shape)}; expected "
                f"[batch, {self.rank} spatial dimensions, channels]."
            )

    def check_partitions(self, images: tf.Tensor, context: Context):
        """Raises UserError where a spatial dimension of `images` has fewer elements than devices share it."""
        for axis, size in zip(SPATIAL_AXES, images.shape[1:-1]):
            devices = context.layout.num_shards(self.axes, axis)
            if size < devices:
                raise UserError(
                    f"{self._name}: {devices} devices share {size} elements along {axis} (mesh {context.layout.mesh}); "
                    f"the partitions of {devices - size} of them would be empty. Use fewer devices for {axis}, larger "
                    f"images, or fewer levels that halve them."
                )

    @property
    def explicit_padding(self) -> tuple[tuple[int, int], ...]:
        """The explicit padding (low, high) of each dimension; zeros for `SAME` and `VALID`."""
        return ((0, 0),) * self.rank if isinstance(self.padding, str) else self.padding

    @property
    def _has_explicit_padding(self) -> bool:
        return not isinstance(self.padding, str)

    def _padded(self, inputs: tf.Tensor, value: float = 0.0) -> tuple[tf.Tensor, str]:
        """Returns (`inputs` with the explicit padding, the padding that is left to the operator).

        TensorFlow pads explicitly in two dimensions alone. There too the padding is an operator of its own: where it is
        wider than the window, the gradient is a convolution with negative padding, for which XLA's CPU compiler reads
        beyond the end of its input.
        """
        if isinstance(self.padding, str):
            return inputs, self.padding
        return tf.pad(inputs, [(0, 0), *self.padding, (0, 0)], constant_values=value), VALID

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _check_sizes(self, name: str, sizes: tuple[int, ...]):
        if len(sizes) != self.rank or any(size < 1 for size in sizes):
            raise UserError(
                f"{self._name}: {name} is {sizes}; give {self.rank} numbers from 1, as the window {self.window} has "
                f"{self.rank} dimensions."
            )

    def _check_padding(self):
        if self.padding in (SAME, VALID):
            return
        is_pair = lambda part: isinstance(part, tuple) and len(part) == 2 and min(part) >= 0  # noqa: E731
        if isinstance(self.padding, str) or len(self.padding) != self.rank or not all(map(is_pair, self.padding)):
            raise UserError(
                f"{self._name}: padding is {self.padding!r}; use SAME, VALID or {self.rank} pairs (low, high) of "
                f"numbers from 0."
            )
