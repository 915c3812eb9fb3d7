"""Instance normalisation (Ulyanov et al. 2016, arXiv 1607.08022)."""

from __future__ import annotations

import dataclasses

from lingvo_moe.layers.base import Context, Layer, Weight
from lingvo_moe.lazy import tf


@dataclasses.dataclass(frozen=True, kw_only=True)
class InstanceNorm(Layer):
    """Subtracts the mean and divides by the standard deviation of each channel of each image; learnt scale and bias.

    It is batch normalisation of a batch of one image, whose own statistics serve in evaluation too: there is no running
    average, and so no state beside the weights. Statistics are float32; devices that share an image add up their
    parts of them.

    Attributes:
      channels: of the images.
      epsilon: added to the variance, so that all pixels of a channel may be equal.
    """

    channels: int
    epsilon: float = 1e-5

    def weights(self) -> dict:
        """See `Layer.weights`."""
        return {
            "scale": Weight((self.channels,), "o", mean=1.0, keep_float32=True),
            "bias": Weight((self.channels,), "o", keep_float32=True),
        }

    def __call__(self, theta: dict, inputs: tf.Tensor, context: Context) -> tf.Tensor:
        """`[B, ..., I]` to the same shape, of the dtype of activations."""
        inputs32, dimensions = tf.cast(inputs, tf.float32), range(1, inputs.shape.rank - 1)
        centred = inputs32 - tf.reduce_mean(inputs32, axis=dimensions, keepdims=True)
        variance = tf.reduce_mean(tf.square(centred), axis=dimensions, keepdims=True)
        return context.cast(centred * tf.math.rsqrt(variance + self.epsilon) * theta["scale"] + theta["bias"])
