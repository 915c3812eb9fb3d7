"""The position-wise mixture-of-experts layer (GShard sections 2.2 and 3.1, Algorithm 2)."""

from __future__ import annotations

import dataclasses
import functools
import math

from lingvo_moe import ranges
from lingvo_moe.layers.base import Context, Layer, Weight, matrix
from lingvo_moe.layers.feed_forward import register_feed_forward
from lingvo_moe.layers.routers.base import Router, call_router, make_router
from lingvo_moe.layers.summaries import router_entropy
from lingvo_moe.lazy import tf
from lingvo_moe.ops.activation import relu
from lingvo_moe.ops.block_sparse import FEW_EXPERTS, BlockSparse, prefers_block_sparse, prepare_experts
from lingvo_moe.ops.compaction import apply_compacted, rows_of_a_pass
from lingvo_moe.ops.dispatch import AUTO, check_dispatch, choose
from lingvo_moe.ops.projection import project_by_expert, project_in_float32
from lingvo_moe.ops.routing import Routing
from lingvo_moe.ranges import ABOVE_0, COUNT, COUNT_OR_0, Range

_ANY_GROUP = 2**20  # tokens; where C = S for a group of this size, C = S for smaller ones too
_RANGES = {
    **dict.fromkeys(("model_dim", "hidden_dim", "num_groups"), COUNT),
    **dict.fromkeys(("inference_min_capacity", "inference_num_groups"), COUNT_OR_0),
    "capacity_factor": ABOVE_0,
    "inference_capacity_factor": Range(),
}


@register_feed_forward("moe")
@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureOfExperts(Layer):
    """E feed-forward networks `wo . relu(wi . x)`, each computing the tokens that the router sends to it.

    Attributes:
      num_groups: G, into which the tokens of a batch are split; each is routed by itself. A batch whose number of
        tokens G does not divide (short ones, in inference) is split into gcd(tokens, G) groups; their sharding is that
        of G if the devices divide that number, too. Each of m microbatches has G / m of the groups.
      router: a registered router, see `layers.routers`: `top2` is the papers'.
      capacity_factor: an expert takes C = factor * S / E tokens of a group of S; 2 is the papers'. None: every
        token of a group.
      inference_capacity_factor: the same outside training. With None, the result of a sentence does not depend on what
        it is batched with.
      inference_min_capacity: the least C outside training (Mesh TensorFlow's and DeepSpeed's minimal capacity). A step
        of decoding has few tokens, and the hypotheses of a sentence often choose the same experts.
      inference_num_groups: G outside training. 0: as in training.
      dispatch: how tokens reach their experts, `einsum`, `gather` or `auto`; see `ops.dispatch`, and `ops.block_sparse`
        for what `auto` is in inference on one processor.
      biases: whether both projections of each expert have a bias; the router's has none.
    """

    model_dim: int
    hidden_dim: int
    num_experts: int
    num_groups: int
    router: str = "top2"
    capacity_factor: float | None = 2.0
    inference_capacity_factor: float | None = None
    inference_min_capacity: int = 1
    inference_num_groups: int = 0
    dispatch: str = AUTO
    biases: bool = False

    def __post_init__(self):
        ranges.check("layer moe: ", self, _RANGES)
        check_dispatch(self.dispatch)
        self.make_router().check(self.num_experts)

    def make_router(self) -> Router:
        """The router."""
        return make_router(self.router)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """See `Layer.metric_names`."""
        return self.make_router().metric_names

    @property
    def is_causal(self) -> bool:
        """See `Layer.is_causal`."""
        return self.make_router().is_causal

    @property
    def independent_in_inference(self) -> bool:
        """See `Layer.independent_in_inference`: true if no token competes for a buffer position."""
        return self.is_causal and self._inference_capacity(_ANY_GROUP) == _ANY_GROUP

    @property
    def experts_per_token(self) -> float:
        """See `Layer.experts_per_token`."""
        return self.make_router().experts_per_token(self.num_experts)

    @property
    def registered_classes(self) -> tuple[type, ...]:
        """See `Layer.registered_classes`."""
        return (type(self.make_router()),)

    def weights(self) -> dict:
        """See `Layer.weights`."""
        sizes = {"E": self.num_experts, "M": self.model_dim, "H": self.hidden_dim}
        matrices = {
            # Lower case: every device routes its own groups to all experts (GShard section 3.2, `wg = replicate(wg)`).
            "gate": dataclasses.replace(matrix("me", fan_in="m", **sizes), keep_float32=True),
            "wi": matrix("EMH", fan_in="M", **sizes),
            "wo": matrix("EHM", fan_in="H", **sizes),
        }
        biases = {
            "wi_bias": Weight((self.num_experts, self.hidden_dim), "EH"),
            "wo_bias": Weight((self.num_experts, self.model_dim), "EM"),
        }
        return {**matrices, **biases} if self.biases else matrices

    def __call__(
        self, theta: dict, inputs: tf.Tensor, paddings: tf.Tensor, context: Context
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """`[B, T, M]` and `[B, T] bool` to (`[B, T, M]`, the router's metrics); see `FeedForward`.

        Tokens that overflow (dropped tokens) and paddings get zeros: the residual connection carries them.
        """
        batch, length, model_dim = inputs.shape
        num_groups = self.num_groups if context.training else self.inference_num_groups or self.num_groups
        groups = math.gcd(batch * length, max(1, num_groups // context.microbatches))
        size = batch * length // groups
        grouped = context.annotate(tf.reshape(inputs, (groups, size, model_dim)), "GSM")
        capacity = self._capacity(size, context)
        with tf.name_scope("gating"):
            routing = self._route(theta, grouped, tf.reshape(paddings, (groups, size)), capacity, context)
        if context.record_routing:
            context.record_routing(context.scope, routing)
        if self._is_block_sparse(context):
            outputs = self._compute_blocks(theta, grouped, routing, context)
        else:
            outputs = self._compute_buffers(theta, grouped, routing, capacity, context)
        return tf.reshape(outputs, (batch, length, model_dim)), routing.metrics

    def prepare_decoding(self, theta: dict, context: Context) -> dict:
        """See `Layer.prepare_decoding`: the weights of few experts are sliced apart, and transposed."""
        if not self._is_block_sparse(context) or self.num_experts > FEW_EXPERTS:
            return theta
        return {**theta, "wi": prepare_experts(theta["wi"]), "wo": prepare_experts(theta["wo"])}

    def _capacity(self, tokens_per_group: int, context: Context) -> int:
        if not context.training:
            return self._inference_capacity(tokens_per_group)
        return self.make_router().capacity(tokens_per_group, self.num_experts, self.capacity_factor)

    def _inference_capacity(self, tokens_per_group: int) -> int:
        router = self.make_router()
        capacity = router.capacity(tokens_per_group, self.num_experts, self.inference_capacity_factor)
        if router.has_fixed_capacity:
            return capacity
        return max(capacity, min(self.inference_min_capacity, tokens_per_group))

    def _is_block_sparse(self, context: Context) -> bool:
        """Whether to compute used positions alone, as most are empty where experts have capacity for every token."""
        has_full_capacity = self._inference_capacity(_ANY_GROUP) == _ANY_GROUP
        return self.dispatch == AUTO and has_full_capacity and prefers_block_sparse(context)

    def _rows_of_a_pass(self, grouped: tf.Tensor, capacity: int, context: Context) -> int | None:
        """See `ops.compaction.rows_of_a_pass`; None also for a router that fills its buffers (expert choice)."""
        if self.make_router().has_fixed_capacity:
            return None
        groups, size, _ = grouped.shape
        tokens_per_expert = groups * size * self.experts_per_token / self.num_experts
        return rows_of_a_pass(tokens_per_expert, groups * capacity, self.hidden_dim, context)

    def _route(self, theta: dict, grouped: tf.Tensor, paddings: tf.Tensor, capacity: int, context: Context) -> Routing:
        """Algorithm 2, lines 1 and 2, in float32: bfloat16 logits would choose other experts."""
        gate = context.annotate(theta["gate"], "me")
        logits = project_in_float32(tf.cast(grouped, tf.float32), gate, context)
        logits = context.checkpoint_name(logits, "hidden", "GSE")
        context.summarize("", lambda: router_entropy(tf.nn.softmax(logits), paddings))
        return call_router(self.make_router(), logits, paddings, capacity, context)

    def _compute_blocks(self, theta: dict, grouped: tf.Tensor, routing: Routing, context: Context) -> tf.Tensor:
        """What `_compute_buffers` computes with capacity for every token (C = S), by `ops.block_sparse`."""
        with tf.name_scope("dispatch"):
            blocks = BlockSparse(routing, self.num_experts, prepared=isinstance(theta["wi"], dict))
            rows = blocks.dispatch(grouped)
        with tf.name_scope("experts"):
            rows = blocks.apply(theta, rows, context)
        with tf.name_scope("combine"):
            return blocks.combine(rows, context)

    def _compute_buffers(
        self, theta: dict, grouped: tf.Tensor, routing: Routing, capacity: int, context: Context
    ) -> tf.Tensor:
        """Algorithm 2, lines 3 to 9: `[G, S, M]` to `[G, S, M]`.

        The order of the logical axes decides the sharding, so the two resharding steps from groups to experts and back,
        each an AllToAll, are the two transpositions GECM -> EGCM and EGCM -> GECM. In inference where most positions
        are empty, a third transposition, GEC -> EGC, sends the experts a mask of the used ones; see `ops.compaction`.
        """
        rows = self._rows_of_a_pass(grouped, capacity, context)
        network = functools.partial(self._network, theta)
        with tf.name_scope("dispatch"):
            buffers = choose(self.dispatch, grouped, context)(routing, self.num_experts, capacity, context)
            dispatched = context.checkpoint_name(tf.einsum("GECM->EGCM", buffers.dispatch(grouped)), "output", "EGCM")
        with tf.name_scope("experts"):
            if rows:
                used = context.annotate(tf.transpose(buffers.used(), (1, 0, 2)), "EGC")
                expert_outputs = apply_compacted(network, dispatched, used, rows, context)
            else:
                expert_outputs = network(dispatched, context)
        with tf.name_scope("combine"):
            expert_outputs = context.checkpoint_name(tf.einsum("EGCM->GECM", expert_outputs), "output", "GECM")
            return buffers.combine(expert_outputs)

    def _network(self, theta: dict, buffers: tf.Tensor, context: Context) -> tf.Tensor:
        """The experts' networks, of `[E, G, C, M]` and to the same shape."""
        hidden = relu(project_by_expert(buffers, theta["wi"], context, theta.get("wi_bias")), "EGCH", context)
        return context.annotate(project_by_expert(hidden, theta["wo"], context, theta.get("wo_bias")), "EGCM")
