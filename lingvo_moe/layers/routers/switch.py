"""Top-1 routing (Fedus, Zoph and Shazeer 2021, "Switch Transformers", arXiv 2101.03961, section 2.1)."""

from __future__ import annotations

import dataclasses

from lingvo_moe.layers.routers.base import (
    Router,
    check_num_experts,
    choice_mask,
    expert_load,
    largest_gates,
    load_balance_loss,
    positions_in_buffers,
    register_router,
    share_of_tokens,
)
from lingvo_moe.lazy import tf
from lingvo_moe.ops.context import Context
from lingvo_moe.ops.routing import Routing


@register_router("switch")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Switch(Router):
    """Each token goes to the expert with its largest gate, its weight (equation 2), if a buffer position is free.

    The aux_loss is 1/E sum_e f_e P_e: equation 4's alpha * E * sum_e f_e P_e is `aux_loss_weight = alpha * E^2`. Other
    metrics: `overflow`, the share of dropped tokens; `expert_load`, the largest expert's share of tokens times E.

    The paper's capacity factors are 1.0 to 2.0, of S / E tokens. The inputs of the router have no jitter (the paper's
    appendix C).
    """

    metric_names = ("aux_loss", "overflow", "expert_load")

    def check(self, num_experts: int):
        """See `Router`."""
        check_num_experts("switch", num_experts, 2)

    def experts_per_token(self, num_experts: int) -> float:
        """See `Router`."""
        return 1.0

    def __call__(self, logits: tf.Tensor, paddings: tf.Tensor, capacity: int, context: Context) -> Routing:
        """See `Router`."""
        gates, present = tf.nn.softmax(logits), tf.logical_not(paddings)
        (expert,), weights = largest_gates(gates, 1, context)
        mask = choice_mask(expert, present, gates.shape[-1])
        (position,) = positions_in_buffers([mask], context)
        used = tf.logical_and(present, position < capacity)
        return Routing(
            experts=expert[..., None],
            positions=position[..., None],
            weights=tf.where(used[..., None], weights, 0.0),
            metrics={
                "aux_loss": load_balance_loss(gates, mask, present),
                "overflow": share_of_tokens(tf.logical_not(used), present),
                "expert_load": expert_load(mask, present),
            },
        )
