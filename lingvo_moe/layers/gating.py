"""Top-2 gating: which experts see which tokens (GShard section 2.2 and Algorithm 1).

`route` decides in a compact form, two choices per token; `combine_weights` spells the decision out as Algorithm 2's
[G, S, E, C] tensor.
"""

from __future__ import annotations

import dataclasses

from lingvo_moe.layers.base import Context
from lingvo_moe.layers.top_k import largest
from lingvo_moe.lazy import tf

_TINY = 1e-9
METRICS = ("overflow", "second_expert", "expert_load")


@dataclasses.dataclass(frozen=True)
class Routing:
    """The two choices of every token; the last dimension is (first, second).

    Attributes:
      experts: `[G, S, 2] int32`, the experts with the largest and the second largest gate.
      positions: `[G, S, 2] int32`, the place in the expert's buffer; at or beyond the capacity for tokens that overflowed.
      weights: `[G, S, 2] float32`, the combine weight; 0 for a choice that is not dispatched.
      aux_loss: scalar float32, Algorithm 1's l_aux = 1/E sum_e (c_e/S) m_e, mean over groups. 1/E^2 is perfect balance.
      metrics: scalars for the log, see `route`.
    """

    experts: tf.Tensor
    positions: tf.Tensor
    weights: tf.Tensor
    aux_loss: tf.Tensor
    metrics: dict[str, tf.Tensor]


def expert_capacity(tokens_per_group: int, num_experts: int, capacity_factor: float | None) -> int:
    """How many tokens of a group an expert takes: C = factor * S / E, at least 1.

    The papers' 2N/(G E) is a factor of 2 (GShard section 2.2, "Local group dispatching"). None: room for all, C = S.
    """
    if capacity_factor is None:
        return tokens_per_group
    return min(tokens_per_group, max(1, int(capacity_factor * tokens_per_group / num_experts)))


def route(gates: tf.Tensor, paddings: tf.Tensor, capacity: int, context: Context) -> Routing:
    """Algorithm 1 for all groups at once.

    Args:
      gates: `[G, S, E] float32`, softmax over experts; E >= 2.
      paddings: `[G, S] bool`, true where there is no token: it takes no place and counts nowhere.
      capacity: C, places per expert and group.
      context: in training the second expert is used with probability 2 * g2 (line 19); otherwise whenever there is room.

    Returns:
      A Routing. Its metrics: `overflow`, the share of tokens that no expert took (both buffers full, or the second not
      drawn); `expert_load`, the largest expert's share of first choices times E (1 is perfect balance); `second_expert`, the
      share of tokens that two experts took.
    """
    num_experts = gates.shape[-1]
    if num_experts < 2:
        raise ValueError(f"top-2 gating needs at least two experts, not {num_experts}.")
    present = tf.logical_not(paddings)
    first, second, normalised = _top_2(gates, context)
    first, second = (context.checkpoint_name(choice, "output", "GS") for choice in (first, second))
    first_mask = _choice_mask(first, present, num_experts, context)
    second_mask = _choice_mask(second, present, num_experts, context)
    # First choices of the whole group stand before any second choice (line 14 goes on with the counts of line 11), and every
    # choice takes a number whether or not it is dispatched (lines 11 and 22).
    first_count = tf.reduce_sum(first_mask, axis=1, keepdims=True)
    first_position = _pick(_positions_before(first_mask), first_mask)
    second_position = _pick(_positions_before(second_mask) + first_count, second_mask)
    first_position, second_position = (
        context.checkpoint_name(place, "output", "GS") for place in (first_position, second_position)
    )
    first_used = tf.logical_and(present, first_position < capacity)
    second_used = tf.logical_and(present, second_position < capacity)
    if context.training:
        draw = context.annotate(context.uniform(tuple(gates.shape[:2]), "second_expert"), "GS")
        second_used = tf.logical_and(second_used, 2.0 * normalised[..., 1] > draw)
    used = tf.stack([first_used, second_used], axis=-1)
    aux_loss, metrics = _balance(gates, first_mask, present, used)
    return Routing(
        experts=tf.stack([first, second], axis=-1),
        positions=tf.stack([first_position, second_position], axis=-1),
        weights=tf.where(used, normalised, 0.0),
        aux_loss=aux_loss,
        metrics=metrics,
    )


def combine_weights(routing: Routing, num_experts: int, capacity: int, context: Context) -> tf.Tensor:
    """Algorithm 2's `[G, S, E, C] float32`: the weight of the token s at place c of expert e; 0 where it is not there."""
    weights = routing.weights[..., None, None]
    experts = tf.equal(routing.experts[..., None], tf.range(num_experts))[..., None]
    places = tf.equal(routing.positions[..., None], tf.range(capacity))[..., None, :]
    placed = tf.where(tf.logical_and(experts, places), weights, 0.0)
    return context.annotate(placed[:, :, 0] + placed[:, :, 1], "GSEC")


def _top_2(gates: tf.Tensor, context: Context) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """The two best experts `[G, S]` (ties: the lower index) and their gates `[G, S, 2]`, normalised (lines 5, 6 and 16)."""
    num_experts = gates.shape[-1]
    _, first = largest(gates)
    is_first = context.annotate(tf.equal(first[..., None], tf.range(num_experts)), "GSE")
    _, second = largest(tf.where(is_first, -1.0, gates))
    is_second = context.annotate(tf.equal(second[..., None], tf.range(num_experts)), "GSE")
    chosen = tf.stack([tf.reduce_sum(tf.where(mask, gates, 0.0), axis=-1) for mask in (is_first, is_second)], axis=-1)
    return first, second, chosen / (tf.reduce_sum(chosen, axis=-1, keepdims=True) + _TINY)


def _choice_mask(choice: tf.Tensor, present: tf.Tensor, num_experts: int, context: Context) -> tf.Tensor:
    """`[G, S]` to `[G, S, E] int32`, 1 at the chosen expert of a present token. Integers: bfloat16 cannot count past 256."""
    chosen = tf.logical_and(tf.equal(choice[..., None], tf.range(num_experts)), present[..., None])
    return context.annotate(tf.cast(chosen, tf.int32), "GSE")


def _positions_before(mask: tf.Tensor) -> tf.Tensor:
    """For each token and expert, how many earlier tokens of the group chose the expert: `[G, S, E] int32`."""
    return tf.cumsum(mask, axis=1, exclusive=True)


def _pick(values: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    """The value at the chosen expert: `[G, S, E]` to `[G, S]`."""
    return tf.reduce_sum(values * mask, axis=-1)


def _balance(gates: tf.Tensor, first_mask: tf.Tensor, present: tf.Tensor, used: tf.Tensor) -> tuple[tf.Tensor, dict]:
    """The auxiliary loss (line 13) and the metrics of `route`. Means are over the tokens that are present."""
    num_experts = gates.shape[-1]
    tokens = tf.reduce_sum(tf.cast(present, tf.float32), axis=1)  # [G]: Algorithm 1's S, without paddings
    inverse = tf.math.divide_no_nan(1.0, tokens)[:, None]
    gate_mean = tf.reduce_sum(tf.where(present[..., None], gates, 0.0), axis=1) * inverse  # m_e [G, E]
    first_share = tf.cast(tf.reduce_sum(first_mask, axis=1), tf.float32) * inverse  # c_e/S [G, E]
    groups = tf.reduce_sum(tf.cast(tokens > 0.0, tf.float32))  # groups of paddings alone have no loss, and do not count
    aux_loss = tf.math.divide_no_nan(tf.reduce_sum(first_share * gate_mean), groups * num_experts)
    total = tf.reduce_sum(tokens)
    served = tf.reduce_sum(tf.cast(used, tf.float32), axis=-1)  # [G, S]: 0, 1 or 2 experts

    def share(condition: tf.Tensor) -> tf.Tensor:
        count = tf.reduce_sum(tf.cast(tf.logical_and(present, condition), tf.float32))
        return tf.math.divide_no_nan(count, total)

    load = tf.reduce_max(tf.cast(tf.reduce_sum(first_mask, axis=(0, 1)), tf.float32))
    metrics = {
        "overflow": share(tf.equal(served, 0.0)),
        "second_expert": share(tf.equal(served, 2.0)),
        "expert_load": tf.math.divide_no_nan(load * num_experts, total),
    }
    return aux_loss, metrics
