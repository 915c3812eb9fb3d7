"""ReLU, with the gradient that is fastest on the platform."""

from __future__ import annotations

from collections.abc import Callable

from lingvo_moe.lazy import tf
from lingvo_moe.ops.context import Context
from lingvo_moe.ops.gradients import named_gradient


def relu(inputs: tf.Tensor, logical_axes: str, context: Context) -> tf.Tensor:
    """`max(inputs, 0)`, of any shape and floating-point dtype.

    What the gradient reads is named `hidden` for the checkpoint policy: the inputs, or for a GPU the result.
    TensorFlow's gradient compares the result with 0. XLA simplifies that to a comparison of the inputs with 0, and so
    keeps both until the backward pass, the largest tensors of a feed-forward layer. For a GPU, the gradient tests that
    the result is not 0, which XLA does not simplify. It keeps the result alone, and cuBLAS applies the ReLU in the
    matmul before it.

    Args:
      inputs: any tensor.
      logical_axes: of its dimensions.
      context: of the call.
    """
    if context.platform != "gpu":
        return tf.nn.relu(context.checkpoint_name(inputs, "hidden", logical_axes))

    def with_gradient(inputs: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        outputs = context.checkpoint_name(tf.nn.relu(inputs), "hidden", logical_axes)

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            return context.annotate(tf.where(tf.not_equal(outputs, 0), upstream, 0), logical_axes)

        return outputs, gradient

    return named_gradient(with_gradient)(inputs)
