"""Compaction of expert buffers, for inference on several devices: few positions without a token are computed.

A group has buffer positions for many tokens at every expert, and in a step of decoding it has few tokens. After the
AllToAll an expert has the positions of all groups, of which few are used. A loop compacts the used ones, a fixed number
of rows per pass, by one-hot matmuls (as `dispatch.Einsum`). Every pass computes these rows, and the results replace
them in their positions. The number of passes is known only at run time, so the loop has no gradient. No token is
dropped: if the fullest expert has more rows than a pass, all experts make another pass.

NaN or infinity in a token makes all rows of its expert NaN, as 0 * NaN and 0 * inf are NaN.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from lingvo_moe.lazy import tf
from lingvo_moe.ops.context import Context
from lingvo_moe.ops.routing import NONE

_MULTIPLE = 8  # rows of a TPU's tile of float32
_LARGEST_COST = 0.5  # of a pass, as a share of computing all positions
# On a TPU or GPU: with fewer positions, reading an expert's weights takes longer than multiplying. By its plan on TPU
# v3, decoding with sparse_lm.MoE10B32E, which has 512 positions, would take 5 % more computation.
_FEWEST_POSITIONS = 1024


def rows_of_a_pass(tokens_per_expert: float, positions: int, hidden_dim: int, context: Context) -> int | None:
    """The rows of an expert that a pass computes; None where all positions are computed at once.

    Args:
      tokens_per_expert: the mean number; a pass has rows for twice as many.
      positions: P of an expert, those of all groups.
      hidden_dim: H of the experts.
      context: of the call.
    """
    layout = context.layout
    are_sharded = any(layout.num_shards("EGCM", axis) > 1 for axis in "GC")
    if context.training or layout.mesh.size == 1 or layout.outer_axes or are_sharded:
        return None
    if context.platform != "cpu" and positions < _FEWEST_POSITIONS:
        return None
    rows = _MULTIPLE * math.ceil(2 * tokens_per_expert / _MULTIPLE)
    # R rows take 2 R M H multiplications in the experts' networks and 2 R M P in the one-hot matmuls, instead of
    # 2 P M H.
    return rows if rows / positions + rows / hidden_dim <= _LARGEST_COST else None


def apply_compacted(
    network: Callable[[tf.Tensor, Context], tf.Tensor],
    buffers: tf.Tensor,
    used: tf.Tensor,
    rows: int,
    context: Context,
) -> tf.Tensor:
    """Applies the experts' network to the used positions of buffers `[E, G, C, M]`; the others stay as they are.

    Args:
      network: from (`[E, 1, rows, M]`, the context) to the same shape; a row depends on no other.
      buffers: `[E, G, C, M]`.
      used: `[E, G, C] bool`, true where a position has a token.
      rows: of each expert in a pass, see `rows_of_a_pass`.
      context: of the call.
    """
    experts, groups, capacity, model_dim = buffers.shape
    positions = tf.reshape(buffers, (experts, groups * capacity, model_dim))
    used = tf.reshape(used, (experts, groups * capacity))
    counts = tf.cumsum(tf.cast(used, tf.int32), axis=1)
    ordinals = tf.where(used, counts - 1, NONE)
    most = tf.reduce_max(counts[:, -1])
    # The checkpoint policy saves tensors for a backward pass, which cannot read those of this loop.
    inner = dataclasses.replace(context, checkpoint_policy=None)

    def make_pass(first: tf.Tensor, positions: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        is_row = tf.equal(ordinals[:, None], (first + tf.range(rows))[:, None])
        one_hot = tf.cast(is_row, positions.dtype)  # [E, rows, G * C]
        compacted = context.annotate(tf.einsum("ERP,EPM->ERM", one_hot, positions)[:, None], "EGCM")
        results = tf.einsum("ERP,ERM->EPM", one_hot, network(compacted, inner)[:, 0])
        is_computed = tf.logical_and(ordinals >= first, ordinals < first + rows)
        return first + rows, tf.where(is_computed[..., None], results, positions)

    _, outputs = tf.while_loop(lambda first, _: first < most, make_pass, (tf.constant(0), positions))
    return context.annotate(tf.reshape(outputs, buffers.shape), "EGCM")
