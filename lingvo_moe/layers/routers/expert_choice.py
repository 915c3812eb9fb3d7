"""Expert-choice routing (Zhou et al. 2022, arXiv 2202.09368, section 3.2)."""

from __future__ import annotations

import dataclasses

from lingvo_moe import ranges
from lingvo_moe.layers.routers.base import (
    Router,
    check_num_experts,
    expert_capacity,
    register_router,
    share_of_tokens,
)
from lingvo_moe.lazy import tf
from lingvo_moe.ops.context import Context
from lingvo_moe.ops.routing import Routing
from lingvo_moe.ranges import ABOVE_0


@register_router("expert_choice")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertChoice(Router):
    """Each expert takes the C tokens of a group with its largest gates.

    The load is balanced and needs no auxiliary loss.
    A token may be taken by several experts or by none; `overflow` is the share of tokens that none takes. The weight is
    the gate, not normalised (the paper's G).

    Not causal: a token competes for its experts with the later tokens of its sequence, and with the other sequences of
    its group. A decoder would see the future in training and could not do so in decoding, so decoders refuse this
    router. In an encoder, the result of a sentence depends on those it is batched with, also in inference.

    Attributes:
      choices_per_token: the paper's capacity factor c: C = c * S / E, in training and inference; the model's
        `capacity_factor`, `inference_capacity_factor` and `inference_min_capacity` have no effect.
    """

    choices_per_token: float = 2.0

    metric_names = ("overflow",)
    is_causal = False
    has_fixed_capacity = True

    def __post_init__(self):
        ranges.check("router expert_choice: ", self, {"choices_per_token": ABOVE_0})

    def check(self, num_experts: int):
        """See `Router`."""
        check_num_experts("expert_choice", num_experts, 2)

    def capacity(self, tokens_per_group: int, num_experts: int, factor: float | None) -> int:
        """See `Router`: c * S / E."""
        del factor
        return expert_capacity(tokens_per_group, num_experts, self.choices_per_token)

    def experts_per_token(self, num_experts: int) -> float:
        """See `Router`."""
        return min(self.choices_per_token, float(num_experts))

    def __call__(self, logits: tf.Tensor, paddings: tf.Tensor, capacity: int, context: Context) -> Routing:
        """See `Router`."""
        gates, present = tf.nn.softmax(logits), tf.logical_not(paddings)
        candidates = tf.where(present[..., None], gates, -1.0)
        _, tokens = tf.math.top_k(context.annotate(tf.einsum("GSE->GES", candidates), "GES"), capacity)
        # [G, S, E, C], of which XLA fuses the comparison with both reductions.
        is_taken = tf.equal(tf.range(gates.shape[1])[:, None, None], tokens[:, None])
        positions = tf.reduce_sum(tf.where(is_taken, tf.range(capacity), 0), axis=-1)
        positions = tf.where(tf.reduce_any(is_taken, axis=-1), positions, capacity)
        positions = context.checkpoint_name(positions, "output", "GSE")
        weights = tf.where(tf.logical_and(present[..., None], positions < capacity), gates, 0.0)
        # A gate may underflow to 0, and what weighs nothing is not dispatched.
        is_dropped = tf.reduce_all(tf.equal(weights, 0.0), axis=-1)
        return Routing(
            experts=None,
            positions=positions,
            weights=weights,
            metrics={"overflow": share_of_tokens(is_dropped, present)},
        )
