"""Layer normalisation, and RMSNorm, which leaves out the mean."""

from __future__ import annotations

import dataclasses

from lingvo_moe.layers.base import Context, Layer, Weight
from lingvo_moe.lazy import tf


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerNorm(Layer):
    """Subtracts the mean and divides by the standard deviation of the model dimension; learnt scale and bias.

    Statistics are float32 whatever the activations are: eight bits of mantissa lose small variances.

    Attributes:
      model_dim: M.
      epsilon: added to the variance, so that the inputs may all be equal.
    """

    model_dim: int
    epsilon: float = 1e-6

    def weights(self) -> dict:
        """See `Layer.weights`."""
        return {
            "scale": Weight((self.model_dim,), "M", mean=1.0, keep_float32=True),
            "bias": Weight((self.model_dim,), "M", keep_float32=True),
        }

    def __call__(self, theta: dict, inputs: tf.Tensor, context: Context) -> tf.Tensor:
        """`[..., M]` to `[..., M]`, of the dtype of activations."""
        wide = tf.cast(inputs, tf.float32)
        centred = wide - tf.reduce_mean(wide, axis=-1, keepdims=True)
        variance = tf.reduce_mean(tf.square(centred), axis=-1, keepdims=True)
        return context.cast(centred * tf.math.rsqrt(variance + self.epsilon) * theta["scale"] + theta["bias"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class RMSNorm(Layer):
    """Divides by the root mean square of the model dimension; learnt scale (Zhang and Sennrich 2019).

    There is no mean and no bias. Statistics are float32, as those of `LayerNorm`.

    Attributes:
      model_dim: M.
      epsilon: added to the mean square, so that the inputs may all be zero.
    """

    model_dim: int
    epsilon: float = LayerNorm.epsilon

    def weights(self) -> dict:
        """See `Layer.weights`."""
        return {"scale": Weight((self.model_dim,), "M", mean=1.0, keep_float32=True)}

    def __call__(self, theta: dict, inputs: tf.Tensor, context: Context) -> tf.Tensor:
        """`[..., M]` to `[..., M]`, of the dtype of activations."""
        wide = tf.cast(inputs, tf.float32)
        mean_square = tf.reduce_mean(tf.square(wide), axis=-1, keepdims=True)
        return context.cast(wide * tf.math.rsqrt(mean_square + self.epsilon) * theta["scale"])


# What `model.norm` may name.
LAYER, RMS = "layer", "rms"
NORMS: dict[str, type[LayerNorm] | type[RMSNorm]] = {LAYER: LayerNorm, RMS: RMSNorm}
