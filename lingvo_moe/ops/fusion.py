"""Where compiled programs compute a value once and store it.

XLA's CPU compiler fuses an elementwise operation into each of its users, which compute it again and read its operands
again. It writes to memory what feeds several sums, and fuses what feeds one. On all platforms, XLA cancels a cast to
bfloat16 and back, and stores the float32 value. A barrier decides otherwise.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from lingvo_moe.lazy import tf
from lingvo_moe.ops.context import Context


def optimization_barrier(tensor: tf.Tensor, context: Context, platforms: Container[str] = ("cpu",)) -> tf.Tensor:
    """Returns `tensor`, of any shape and dtype: XLA does not fuse what computes it with what uses the result.

    Equal operations on a tensor and on its barrier, or on two of its barriers, stay separate. On platforms other than
    `platforms`, and outside of a compiled program, this does nothing.
    """
    if context.platform not in platforms or tf.executing_eagerly():  # TensorFlow itself has no such operation
        return tensor
    from tensorflow.compiler.tf2xla.python import xla

    tensors: Any = xla.optimization_barrier(tensor)
    return tensors[0]
