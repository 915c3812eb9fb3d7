"""The position-wise mixture-of-experts layer (GShard section 2.2, Algorithm 2)."""

from __future__ import annotations

import dataclasses
import math

from lingvo_moe.layers import gating
from lingvo_moe.layers.base import Context, Layer, matrix, project, project_by_expert
from lingvo_moe.layers.block_sparse import FEW, BlockSparse, unstack_experts
from lingvo_moe.layers.dispatch import AUTO, check_dispatch, choose
from lingvo_moe.layers.summaries import router_entropy
from lingvo_moe.lazy import tf

METRICS = ("aux_loss", *gating.METRICS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureOfExperts(Layer):
    """E feed-forward networks, of which each token is sent to at most two.

    Attributes:
      num_groups: G, into which the tokens of a batch are cut; each is gated by itself. A batch whose number of tokens G does
        not divide (short ones, in inference) is cut into gcd(tokens, G) groups, which keeps G's sharding.
      capacity_factor: an expert takes C = factor * S / E tokens of a group of S; 2 is the papers'.
      inference_capacity_factor: the same outside training. None: room for all, so that no sentence's result depends on
        what it is batched with.
      dispatch: how tokens reach their experts, "einsum", "gather" or "auto"; see `layers.dispatch`, and `layers.blocks` for what
        "auto" is in inference on one processor.
    """

    model_dim: int
    hidden_dim: int
    num_experts: int
    num_groups: int
    capacity_factor: float = 2.0
    inference_capacity_factor: float | None = None
    dispatch: str = AUTO

    def __post_init__(self):
        check_dispatch(self.dispatch)

    def weights(self) -> dict:
        sizes = {"E": self.num_experts, "M": self.model_dim, "H": self.hidden_dim}
        return {
            # Lower case: every device gates its own groups for all experts (GShard section 3.2, `wg = replicate(wg)`).
            "gate": matrix("me", fan_in="m", wide=True, **sizes),
            "wi": matrix("EMH", fan_in="M", **sizes),
            "wo": matrix("EHM", fan_in="H", **sizes),
        }

    def __call__(self, theta: dict, inputs: tf.Tensor, paddings: tf.Tensor, context: Context) -> tuple[tf.Tensor, dict]:
        """`[B, T, M]` and `[B, T] bool` to (`[B, T, M]`, `METRICS`, as `gating.route` defines them).

        Tokens that overflow, and paddings, get zeros: the residual connection carries them.
        """
        batch, length, model_dim = inputs.shape
        groups = math.gcd(batch * length, self.num_groups)
        tokens_per_group = batch * length // groups
        factor = self.capacity_factor if context.training else self.inference_capacity_factor
        capacity = gating.expert_capacity(tokens_per_group, self.num_experts, factor)
        grouped = context.annotate(tf.reshape(inputs, (groups, tokens_per_group, model_dim)), "GSM")
        with tf.name_scope("gating"):
            routing = self._route(theta, grouped, tf.reshape(paddings, (groups, tokens_per_group)), capacity, context)
        way = self._block_sparse if self._can_skip(context) else self._dense_buffers
        outputs = way(theta, grouped, routing, capacity, context)
        outputs = context.annotate(tf.reshape(outputs, (batch, length, model_dim)), "BTM")
        return outputs, {"aux_loss": routing.aux_loss, **routing.metrics}

    def unstack(self, theta: dict, context: Context) -> dict:
        """The weights, stacked for R layers, as calls take them that follow one another: what each would cut out, cut out once."""
        if not self._can_skip(context) or self.num_experts > FEW:
            return theta
        return {**theta, "wi": unstack_experts(theta["wi"]), "wo": unstack_experts(theta["wo"])}

    def _route(
        self, theta: dict, grouped: tf.Tensor, paddings: tf.Tensor, capacity: int, context: Context
    ) -> gating.Routing:
        """Algorithm 2, lines 1 and 2, in float32: gates decide, so they are never rounded to bfloat16."""
        gate, exact = context.annotate(theta["gate"], "me"), dataclasses.replace(context, dtype="float32")
        logits = context.checkpoint_name(project(tf.cast(grouped, tf.float32), gate, exact), "hidden", "GSE")
        gates = context.annotate(tf.nn.softmax(logits), "GSE")
        context.summarize("", lambda: router_entropy(gates, paddings))
        return gating.route(gates, context.annotate(paddings, "GS"), capacity, context)

    def _can_skip(self, context: Context) -> bool:
        """Whether to compute only blocks that hold a token: in inference, where a processor has all experts to itself."""
        room_for_all = self.inference_capacity_factor is None and not context.training
        return self.dispatch == AUTO and room_for_all and context.platform == "cpu" and context.layout.mesh.size == 1

    def _block_sparse(
        self, theta: dict, grouped: tf.Tensor, routing: gating.Routing, capacity: int, context: Context
    ) -> tf.Tensor:
        """What `_in_buffers` computes, as `layers.blocks` does; nobody is left out for want of `capacity`."""
        del capacity
        with tf.name_scope("dispatch"):
            blocks = BlockSparse(routing, self.num_experts)
            rows = blocks.dispatch(grouped)
        with tf.name_scope("experts"):
            rows = blocks.apply(theta, rows, context)
        with tf.name_scope("combine"):
            return blocks.combine(rows, context)

    def _dense_buffers(
        self, theta: dict, grouped: tf.Tensor, routing: gating.Routing, capacity: int, context: Context
    ) -> tf.Tensor:
        """Algorithm 2, lines 3 to 9: `[G, S, M]` to `[G, S, M]`.

        The order of the letters says where a tensor is cut, so the two switches from groups to experts and back, each an
        AllToAll, are the two transpositions GECM -> EGCM and EGCM -> GECM.
        """
        with tf.name_scope("dispatch"):
            positions = choose(self.dispatch, grouped, context)(routing, self.num_experts, capacity, context)
            dispatched = context.checkpoint_name(tf.einsum("GECM->EGCM", positions.dispatch(grouped)), "output", "EGCM")
        with tf.name_scope("experts"):
            hidden = context.checkpoint_name(project_by_expert(dispatched, theta["wi"], context), "hidden", "EGCH")
            expert_outputs = project_by_expert(tf.nn.relu(hidden), theta["wo"], context)
            expert_outputs = context.annotate(expert_outputs, "EGCM")
        with tf.name_scope("combine"):
            expert_outputs = context.checkpoint_name(tf.einsum("EGCM->GECM", expert_outputs), "output", "GECM")
            return positions.combine(expert_outputs)
