"""The two products of attention, in the form that is fastest on the platform.

The plain form is one einsum. A CPU is slow at the product of one row and a matrix, so for a single query over a cache,
as in each decoding step, both products are elementwise multiplications and sums, in float32. Where a cache has more
positions than are written, a CPU reads the smallest part of it that holds these.
"""

from __future__ import annotations

from collections.abc import Callable

from lingvo_moe.lazy import tf
from lingvo_moe.ops.context import Context

# Logical axes of the keys and values of a cache, which decoding reads at every step: as the two products read them, so
# that they are transposed once.
CACHED_AXES = ("BNDL", "BNLD")
_PARTS = (4, 2)  # the parts of a cache that are read alone: a quarter, a half


def attention_logits(queries: tf.Tensor, keys: tf.Tensor, key_axes: str, context: Context) -> tf.Tensor:
    """Products of queries `[B, T, N, D]` and keys, with the logical axes `key_axes`: `[B, N, T, L]`."""
    if not _is_single_query(queries.shape[1], key_axes, CACHED_AXES[0], context):
        return tf.einsum(f"BTND,{key_axes}->BNTL", queries, keys)
    query, keys = tf.cast(tf.einsum("BTND->BNDT", queries), tf.float32), tf.cast(keys, tf.float32)
    return tf.reduce_sum(query * keys, axis=2)[:, :, None]


def attention_mean(probabilities: tf.Tensor, values: tf.Tensor, value_axes: str, context: Context) -> tf.Tensor:
    """Means of values, with the logical axes `value_axes`, by probabilities `[B, N, T, L]`: `[B, T, N, D]`."""
    if not _is_single_query(probabilities.shape[2], value_axes, CACHED_AXES[1], context):
        return tf.einsum(f"BNTL,{value_axes}->BTND", probabilities, values)
    wide, values = tf.cast(tf.einsum("BNTL->BNLT", probabilities), tf.float32), tf.cast(values, tf.float32)
    return tf.cast(tf.reduce_sum(wide * values, axis=2), probabilities.dtype)[:, None]


def over_written(attend: Callable[[int], tf.Tensor], written: tf.Tensor, positions: int, context: Context) -> tf.Tensor:
    """Returns `attend(n)`, attention over the first n positions of a cache, where those that follow are not written.

    Args:
      attend: gives tensors of one shape for all n.
      written: `[] int32`, how many of the first positions are written, or may be seen for another reason.
      positions: of the cache, the largest n.
      context: of the call. On one CPU device, n is the first of a quarter and a half of the positions that is large
        enough; else it is all of them.
    """

    def smallest(sizes: list[int]) -> tf.Tensor:
        if not sizes:
            return attend(positions)
        return tf.cond(written <= sizes[0], lambda: attend(sizes[0]), lambda: smallest(sizes[1:]))

    chooses = context.platform == "cpu" and context.layout.is_one_device
    return smallest([positions // part for part in _PARTS if positions >= part] if chooses else [])


def _is_single_query(num_queries: int, logical_axes: str, cached_axes: str, context: Context) -> bool:
    return context.platform == "cpu" and num_queries == 1 and logical_axes == cached_axes
