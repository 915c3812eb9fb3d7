"""Checkpoint policies (activation checkpointing): which named tensors a repeat saves for its backward pass.

A layer names them with `Context.checkpoint_name`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lingvo_moe.lazy import tf

# What a repeat saves for its backward pass:
#   none: everything
#   full: inputs only
#   keep_outputs: also sublayer outputs and results of collectives
#   keep_hidden: also hidden layers and attention projections
REMAT = ("none", "full", "keep_outputs", "keep_hidden")
SAVED_NAMES = {"full": (), "keep_outputs": ("output",), "keep_hidden": ("output", "hidden")}


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """What a loop must know of a tensor before its first iteration."""

    shape: tf.TensorShape
    dtype: tf.DType
    logical_axes: str


class Save:
    """A checkpoint policy for the forward pass: records the tensors with some checkpoint names, in order.

    Attributes:
      tensors: the recorded tensors.
      specs: of them.
    """

    def __init__(self, names: Sequence[str]):
        self.tensors: list[tf.Tensor] = []
        self.specs: list[TensorSpec] = []
        self._names = names

    def __call__(self, tensor: tf.Tensor, name: str, logical_axes: str) -> tf.Tensor:
        """See `Context.checkpoint_name`."""
        if name in self._names:
            self.tensors.append(tensor)
            self.specs.append(TensorSpec(tensor.shape, tensor.dtype, logical_axes))
        return tensor


class Restore:
    """A checkpoint policy for the backward pass: returns the saved tensors, so that they are not recomputed.

    Their gradients still flow to what they were computed from.
    """

    def __init__(self, names: Sequence[str], saved: Sequence[tf.Tensor]):
        self._names, self._saved = names, iter(saved)

    def __call__(self, tensor: tf.Tensor, name: str, logical_axes: str) -> tf.Tensor:
        """See `Context.checkpoint_name`."""
        if name not in self._names:
            return tensor
        saved = next(self._saved)
        if not tensor.dtype.is_floating:
            return saved
        return tf.custom_gradient(lambda _: (tf.identity(saved), lambda gradient: gradient))(tensor)
