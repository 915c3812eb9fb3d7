"""The dense position-wise feed-forward layer."""

from __future__ import annotations

import dataclasses

from lingvo_moe.layers.base import Context, Layer, matrix, project
from lingvo_moe.lazy import tf


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeedForward(Layer):
    """`wo . relu(wi . x)` (GShard section 2.2, equation 1's FFN_e for a single expert)."""

    model_dim: int
    hidden_dim: int

    def weights(self) -> dict:
        sizes = {"M": self.model_dim, "H": self.hidden_dim}
        return {"wi": matrix("MH", fan_in="M", **sizes), "wo": matrix("HM", fan_in="H", **sizes)}

    def __call__(self, theta: dict, inputs: tf.Tensor, paddings: tf.Tensor, context: Context) -> tuple[tf.Tensor, dict]:
        """`[B, T, M]` to (`[B, T, M]`, no metrics); `paddings` is taken for the sake of one interface with experts."""
        del paddings  # each position is computed by itself
        hidden = tf.nn.relu(context.checkpoint_name(project(inputs, theta["wi"], context), "hidden", "BTH"))
        outputs = project(hidden, theta["wo"], context)
        return context.checkpoint_name(outputs, "output", "BTM"), {}
