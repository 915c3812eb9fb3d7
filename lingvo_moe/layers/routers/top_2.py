"""Top-2 routing (GShard section 2.2 and Algorithm 1): the papers' router and the default."""

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

_TINY = 1e-9


@register_router("top2")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Top2(Router):
    """Each token goes to the experts with its two largest gates, as long as buffer positions are free.

    The aux_loss counts first choices, before the capacity cuts any. Other metrics: `overflow`, the share of dropped
    tokens, which no expert took (both buffers full, or the second not drawn); `second_expert`, the share of tokens that
    two experts took; `expert_load`, the largest expert's share of first choices times E (1 is perfect balance).
    """

    metric_names = ("aux_loss", "overflow", "second_expert", "expert_load")

    def check(self, num_experts: int):
        """See `Router`."""
        check_num_experts("top2", num_experts, 2)

    def experts_per_token(self, num_experts: int) -> float:
        """See `Router`."""
        return 2.0

    def __call__(self, logits: tf.Tensor, paddings: tf.Tensor, capacity: int, context: Context) -> Routing:
        """See `Router`.

        The second expert is used if its buffer has a free position: in training with probability min(1, 2 * g2),
        otherwise always (line 19).
        """
        return route(tf.nn.softmax(logits), paddings, capacity, context)


def route(gates: tf.Tensor, paddings: tf.Tensor, capacity: int, context: Context) -> Routing:
    """Algorithm 1 for all groups at once, from gates `[G, S, E] float32`; see `Router.__call__` and `Top2`."""
    present = tf.logical_not(paddings)
    experts, gates_of_two = largest_gates(gates, 2, context)  # lines 5 and 15
    normalised = gates_of_two / (tf.reduce_sum(gates_of_two, axis=-1, keepdims=True) + _TINY)  # lines 6 and 16
    masks = [choice_mask(expert, present, gates.shape[-1]) for expert in experts]
    first_position, second_position = positions_in_buffers(masks, context)
    # Tokens at positions beyond the capacity are dropped.
    first_used = tf.logical_and(present, first_position < capacity)  # line 8
    second_used = tf.logical_and(present, second_position < capacity)  # line 19
    if context.training:
        draw = context.uniform(tuple(gates.shape[:2]), "second_expert")  # line 17
        second_used = tf.logical_and(second_used, 2.0 * normalised[..., 1] > draw)
    weights = tf.where(tf.stack([first_used, second_used], axis=-1), normalised, 0.0)
    # [G, S]: 0, 1 or 2 experts. A gate may underflow to 0, and what weighs nothing is not dispatched.
    num_used = tf.reduce_sum(tf.cast(tf.not_equal(weights, 0.0), tf.float32), axis=-1)
    return Routing(
        experts=tf.stack(experts, axis=-1),
        positions=tf.stack([first_position, second_position], axis=-1),
        weights=weights,
        metrics={
            "aux_loss": load_balance_loss(gates, masks[0], present),  # line 13
            "overflow": share_of_tokens(tf.equal(num_used, 0.0), present),
            "second_expert": share_of_tokens(tf.equal(num_used, 2.0), present),
            "expert_load": expert_load(masks[0], present),
        },
    )
