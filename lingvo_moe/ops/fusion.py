"""Where a CPU's compiled programs compute a value once and store it.

XLA's CPU compiler fuses an elementwise operation into each of its users, which compute it again and read its operands
again. It writes to memory what feeds several sums, and fuses what feeds one. A barrier decides otherwise.
"""

from __future__ import annotations

from typing import Any

from lingvo_moe.lazy import tf
from lingvo_moe.ops.context import Context


def optimization_barrier(tensor: tf.Tensor, context: Context) -> tf.Tensor:
    """Returns the tensor, which XLA fuses with nothing that uses the result; on other platforms than CPUs it may.

    Two barriers of one tensor are two tensors to XLA, and what is computed from them is not merged.
    """
    if context.platform != "cpu" or tf.executing_eagerly():  # TensorFlow itself has no such operation
        return tensor
    from tensorflow.compiler.tf2xla.python import xla

    tensors: Any = xla.optimization_barrier(tensor)
    return tensors[0]
