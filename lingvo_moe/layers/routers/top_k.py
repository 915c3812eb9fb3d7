"""Top-k routing without dropped tokens.

Shazeer et al. 2017, arXiv 1701.06538, section 2.1; Jiang et al. 2024, "Mixtral", arXiv 2401.04088, section 2.1. As
Mixtral's, it adds no noise to the logits, and the auxiliary loss is that of the other routers here instead of Shazeer's
losses of importance and load.
"""

from __future__ import annotations

import dataclasses

from lingvo_moe.errors import UserError
from lingvo_moe.layers.routers.base import (
    Router,
    check_num_experts,
    choice_mask,
    expert_load,
    largest_gates,
    load_balance_loss,
    positions_in_buffers,
    register_router,
)
from lingvo_moe.lazy import tf
from lingvo_moe.ops.context import Context
from lingvo_moe.ops.routing import Routing


@register_router("top_k")
@dataclasses.dataclass(frozen=True, kw_only=True)
class TopK(Router):
    """Each token goes to the experts with its k largest gates; experts have capacity for every token (C = S).

    The weights are the gates over the sum of the chosen ones, which is the softmax of the k largest logits.
    `capacity_factor` and `inference_capacity_factor` have no effect: C = S, so buffers hold E / k times what is used.

    The aux_loss counts all k choices: c_e is the sum over tokens of 1/k for each choice of e. `expert_load` is the
    largest expert's share of choices times E.

    Attributes:
      k: experts per token. With 1 all weights are 1 and the gates have a gradient from the aux_loss alone; `switch` is
        top-1 with weights.
    """

    k: int = 2

    metric_names = ("aux_loss", "expert_load")

    def __post_init__(self):
        if self.k < 1:
            raise UserError(f"router top_k: k is {self.k}; it must be at least 1.")

    def check(self, num_experts: int):
        """See `Router`."""
        check_num_experts(f"top_k with k={self.k}", num_experts, max(2, self.k))

    def capacity(self, tokens_per_group: int, num_experts: int, factor: float | None) -> int:
        """See `Router`: capacity for every token, C = S."""
        del num_experts, factor
        return tokens_per_group

    def experts_per_token(self, num_experts: int) -> float:
        """See `Router`."""
        return float(self.k)

    def __call__(self, logits: tf.Tensor, paddings: tf.Tensor, capacity: int, context: Context) -> Routing:
        """See `Router`; `capacity` is S."""
        del capacity
        gates, present = tf.nn.softmax(logits), tf.logical_not(paddings)
        experts, chosen = largest_gates(gates, self.k, context)
        masks = [choice_mask(expert, present, gates.shape[-1]) for expert in experts]
        share = tf.cast(tf.add_n(masks), tf.float32) / self.k
        normalised = chosen / tf.reduce_sum(chosen, axis=-1, keepdims=True)
        return Routing(
            experts=tf.stack(experts, axis=-1),
            positions=tf.stack(positions_in_buffers(masks, context), axis=-1),
            weights=tf.where(present[..., None], normalised, 0.0),
            metrics={
                "aux_loss": load_balance_loss(gates, share, present),
                "expert_load": expert_load(share, present),
            },
        )
