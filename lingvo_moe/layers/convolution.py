"""Convolutions over time: the Conformer's convolution module, and the subsampling before its backbone.

Gulati et al. 2020 (arXiv 2005.08100), sections 2 and 2.2, which GSPMD section 5.3 refers to.
"""

from __future__ import annotations

import dataclasses

from lingvo_moe.errors import UserError
from lingvo_moe.layers.base import Context, Layer, Weight, matrix
from lingvo_moe.layers.normalization import LayerNorm
from lingvo_moe.lazy import tf
from lingvo_moe.ops.projection import project
from lingvo_moe.utils.subsampling import SUBSAMPLING

_TAPS = 3  # of a subsampling convolution, in time and in frequency


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvolutionModule(Layer):
    """Pointwise convolution with a gate (GLU), depthwise convolution, normalisation, swish, pointwise convolution.

    Gulati et al. normalise by batch. Here it is layer normalisation: statistics of a batch would couple the
    microbatches of a pipeline, which pass the stages at different times, and running averages would be a state beside
    the weights, which the pure step function does not have. GSPMD does not say which it used.

    Attributes:
      model_dim: M.
      kernel_size: K, the positions that an output depends on: (K - 1) // 2 before it and K // 2 after it.
      norm_epsilon: of the layer normalisation.
    """

    model_dim: int
    kernel_size: int
    norm_epsilon: float = LayerNorm.epsilon

    def __post_init__(self):
        if self.kernel_size < 1:
            raise UserError(f"kernel_size is {self.kernel_size}; a convolution needs at least one position.")

    def weights(self) -> dict:
        """See `Layer.weights`."""
        sizes = {"M": self.model_dim, "H": self.model_dim, "T": self.kernel_size}
        return {
            "value": matrix("MH", fan_in="M", **sizes),
            "gate": matrix("MH", fan_in="M", **sizes),
            "depthwise": matrix("tH", fan_in="t", **sizes),
            "depthwise_norm": self._norm.weights(),
            "wo": matrix("HM", fan_in="H", **sizes),
        }

    def __call__(self, theta: dict, inputs: tf.Tensor, paddings: tf.Tensor, context: Context) -> tf.Tensor:
        """`[B, T, M]`, normalised, and `paddings [B, T] bool` to `[B, T, M]`, for which no padding was read."""
        value = context.checkpoint_name(project(inputs, theta["value"], context), "hidden", "BTH")
        gate = context.checkpoint_name(project(inputs, theta["gate"], context), "hidden", "BTH")
        gated = tf.where(paddings[..., None], tf.zeros((), value.dtype), value * tf.sigmoid(gate))
        mixed = self._depthwise(gated, context.cast(theta["depthwise"]))
        normed = self._norm(theta["depthwise_norm"], context.annotate(mixed, "BTH"), context)
        outputs = project(normed * tf.sigmoid(normed), theta["wo"], context)
        return context.checkpoint_name(outputs, "output", "BTM")

    def _depthwise(self, inputs: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
        """The convolution of each channel of `[B, T, M]` by itself with `[K, M]`, zero-padded: `[B, T, M]`.

        A sum of shifted products, which every platform fuses, and which is vectorised over stages as it is. It is
        float32, as that of a convolution operator is: in bfloat16, each of K - 1 additions would round.
        """
        before, length = (self.kernel_size - 1) // 2, inputs.shape[1]
        padded = tf.pad(inputs, [[0, 0], [before, self.kernel_size // 2], [0, 0]])
        taps = tf.unstack(tf.cast(kernel, tf.float32))
        products = [tf.cast(padded[:, number : number + length], tf.float32) * tap for number, tap in enumerate(taps)]
        return tf.cast(tf.add_n(products), inputs.dtype)

    @property
    def _norm(self) -> LayerNorm:
        return LayerNorm(model_dim=self.model_dim, epsilon=self.norm_epsilon)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subsampling(Layer):
    """Two 3 x 3 convolutions of stride 2 over time and frequency, each with ReLU, and a projection to M.

    Attributes:
      num_bins: F, the features of a frame; a multiple of 4.
      channels: of both convolutions.
      model_dim: M.
    """

    num_bins: int
    channels: int
    model_dim: int

    def __post_init__(self):
        if self.num_bins < SUBSAMPLING or self.num_bins % SUBSAMPLING:
            raise UserError(f"num_bins is {self.num_bins}; subsampling needs a multiple of {SUBSAMPLING}.")

    def weights(self) -> dict:
        """See `Layer.weights`; kernels are `[time, frequency, channels in, channels out]`."""
        taps, channels = {"T": _TAPS, "L": _TAPS}, self.channels
        outputs = {"L": self.num_bins // SUBSAMPLING, "C": channels, "M": self.model_dim}
        return {
            "first": matrix("tlcd", fan_in="tlc", C=1, D=channels, **taps),
            "first_bias": Weight((channels,), "d"),
            "second": matrix("tlcd", fan_in="tlc", C=channels, D=channels, **taps),
            "second_bias": Weight((channels,), "d"),
            "projection": matrix("lcM", fan_in="lc", **outputs),
        }

    def __call__(
        self, theta: dict, features: tf.Tensor, paddings: tf.Tensor, context: Context
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """`[B, S, F] float32` and `paddings [B, S] bool`, S a multiple of 4, to (`[B, S / 4, M]`, its paddings).

        Position t is of the frames 4 t to 4 t + 6, and is padding where frame 4 t is.
        """
        with tf.name_scope("subsampling"):
            hidden = _zero_paddings(context.cast(features)[..., None], paddings)
            for name in ("first", "second"):
                kernel, bias = context.cast(theta[name]), context.cast(theta[f"{name}_bias"])
                hidden = tf.nn.relu(tf.nn.conv2d(hidden, kernel, strides=2, padding="SAME") + bias)
                paddings = paddings[:, ::2]
                hidden = context.annotate(_zero_paddings(hidden, paddings), "BTld")
            outputs = project(hidden, theta["projection"], context, contracted=2)
            return context.annotate(outputs, "BTM"), paddings


def _zero_paddings(inputs: tf.Tensor, paddings: tf.Tensor) -> tf.Tensor:
    """`[B, S, F, C]` with zeros for padding, so that its amount changes no output."""
    return tf.where(paddings[..., None, None], tf.zeros((), inputs.dtype), inputs)
