"""A router's decision: which experts take which tokens, with which weights. Routers return it, dispatch executes it."""

from __future__ import annotations

import dataclasses
import functools
import operator

from lingvo_moe.lazy import tf

NONE = -1  # the index of no buffer position, and of no choice
# The metric that a model adds to its loss, times `aux_loss_weight`.
AUX_LOSS = "aux_loss"
_LONG_SUM = 8  # choices


@dataclasses.dataclass(frozen=True)
class Routing:
    """K choices for every token, K being static. A choice with weight 0 is not dispatched.

    With top-k routing K is the number of experts that a token chooses. With expert choice any number of experts may
    take a token: K is E, and choice e is expert e.

    Attributes:
      experts: `[G, S, K] int32`, the expert of each choice; None where K = E and choice e is expert e.
      positions: `[G, S, K] int32`, the position in the expert's buffer; at or beyond the capacity for tokens that
        overflow.
      weights: `[G, S, K] float32`, the combine weights; 0 for a choice that is not dispatched.
      metrics: scalars by name: the router's `metric_names`.
    """

    experts: tf.Tensor | None
    positions: tf.Tensor
    weights: tf.Tensor
    metrics: dict[str, tf.Tensor]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(G, S, K)."""
        groups, size, num_choices = self.weights.shape
        return groups, size, num_choices

    def expert_indices(self) -> tf.Tensor:
        """The expert of each choice, `[G, S, K] int32`."""
        if self.experts is None:
            return tf.broadcast_to(tf.range(self.shape[2]), self.shape)
        return self.experts

    def buffer_positions(self, capacity: int) -> tf.Tensor:
        """The position of each choice among all E * C, by expert: `[G, S, K] int32`, NONE where not dispatched.

        A token with NaN has a weight other than 0. Its position may be beyond the capacity, where the buffer of the
        next expert, or of the next group, begins.
        """
        positions = self.expert_indices() * capacity + self.positions
        dispatched = tf.logical_and(tf.not_equal(self.weights, 0.0), self.positions < capacity)
        return tf.where(dispatched, positions, NONE)

    def combine_weights(self, num_experts: int, capacity: int) -> tf.Tensor:
        """Algorithm 2's `[G, S, E, C] float32`: the weight of token s at position c of expert e; 0 elsewhere."""
        weights = self.weights[..., None]
        is_position = tf.equal(self.positions[..., None], tf.range(capacity))
        if self.experts is None:
            return tf.where(is_position, weights, 0.0)
        is_expert = tf.equal(self.experts[..., None], tf.range(num_experts))
        is_both = tf.logical_and(is_expert[..., None], is_position[..., None, :])
        return sum_of_choices(tf.where(is_both, weights[..., None], 0.0))


def sum_of_choices(tensor: tf.Tensor) -> tf.Tensor:
    """Sums `[G, S, K, ...]` over the K choices of each token: `[G, S, ...]`."""
    if tensor.shape[2] > _LONG_SUM:
        return tf.reduce_sum(tensor, axis=2)
    # A chain of sums, which XLA fuses with what computes the terms better than a reduction.
    return functools.reduce(operator.add, tf.unstack(tensor, axis=2))
