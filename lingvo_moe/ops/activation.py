"""ReLU, with the gradient that is fastest on the platform."""

from __future__ import annotations

from collections.abc import Callable

from lingvo_moe.lazy import tf
from lingvo_moe.ops.context import Context
from lingvo_moe.ops.gradients import named_gradient


def relu(inputs: tf.Tensor, context: Context) -> tf.Tensor:
    """`max(inputs, 0)`, of any shape and floating-point dtype.

    TensorFlow's gradient asks whether the result is greater than 0. XLA makes of it whether the inputs are, and so
    keeps the inputs, the largest tensor of a feed-forward layer, beside the result until the backward pass. For a GPU,
    the gradient asks whether the result differs from 0, which XLA leaves as it is: the inputs are not even written, as
    the product that computes them applies the ReLU.
    """
    return named_gradient(_with_gradient)(inputs) if context.platform == "gpu" else tf.nn.relu(inputs)


def _with_gradient(inputs: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    outputs = tf.nn.relu(inputs)

    def gradient(upstream: tf.Tensor) -> tf.Tensor:
        return tf.where(tf.not_equal(outputs, 0), upstream, 0)

    return outputs, gradient
