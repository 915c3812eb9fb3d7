"""The two matmuls of attention, in the fastest form for the platform, and the softmax between them.

The plain form of a matmul is one einsum. A CPU is slow at the matmul of one row and a matrix, so for a single query
over a cache, as in each decoding step, both matmuls are elementwise multiplications and sums, in float32. Where a
cache has more positions than are written, a CPU reads the smallest part of it that holds these. A TPU reads the cache
before the new positions are written, and these positions beside it.
"""

from __future__ import annotations

from collections.abc import Callable

from lingvo_moe.lazy import tf
from lingvo_moe.ops.context import Context
from lingvo_moe.ops.fusion import optimization_barrier
from lingvo_moe.ops.gradients import named_gradient

# Logical axes of the keys and values of a cache, which decoding reads at every step: as the two matmuls read them, so
# that they are transposed once.
CACHED_AXES = ("BNDL", "BNLD")
MASKED_LOGIT = -1e9  # its exponential is 0 beside that of any other logit
_PARTS = (4, 2)  # the parts of a cache that are read alone: a quarter, a half


def attention_logits(queries: tf.Tensor, keys: tf.Tensor, key_axes: str, context: Context) -> tf.Tensor:
    """Matmul of queries `[B, T, N, D]` and keys, with the logical axes `key_axes`: `[B, N, T, L]`.

    Of the dtype of the factors, except for one query on a CPU, whose logits are float32. In bfloat16, a logit has eight
    significant bits.
    """
    if not _is_single_query(queries.shape[1], key_axes, CACHED_AXES[0], context):
        return tf.einsum(f"BTND,{key_axes}->BNTL", queries, keys)
    query, keys = tf.cast(tf.einsum("BTND->BNDT", queries), tf.float32), tf.cast(keys, tf.float32)
    return tf.reduce_sum(query * keys, axis=2)[:, :, None]


def attention_mean(
    logits: tf.Tensor,
    mask: tf.Tensor,
    values: tf.Tensor,
    value_axes: str,
    drop: Callable[[tf.Tensor], tf.Tensor],
    context: Context,
) -> tf.Tensor:
    """Means of values, by the softmax of logits where a mask is true: `[B, T, N, D]`, of the dtype of activations.

    A query that sees no key gets the mean of all values. The softmax is computed in float32. The means are named
    `hidden` for the checkpoint policy.

    On a GPU, memory bounds the time between the matmuls, so the gradient reads and writes less there. As in
    FlashAttention (Dao et al. 2022, section B.2), the sum over keys of probabilities and their gradients is the product
    of the mean and its gradient, a sum over D. And the probabilities are kept as they are multiplied: in bfloat16,
    where TensorFlow's gradient, and XLA's without the barrier, read them in float32.

    Args:
      logits: `[B, N, T, L]`, floating-point.
      mask: `[B, T, L] bool`.
      values: with the logical axes `value_axes`, of the dtype of activations.
      value_axes: a permutation of `BLND`.
      drop: dropout of probabilities `[B, N, T, L]`: multiplies each by a constant, the same in every call.
      context: of the call.
    """
    # Rematerialised layers keep no probabilities; there the other gradient was predicted to gain nothing.
    has_custom_gradient = context.platform == "gpu" and context.checkpoint_policy is None

    def mean(logits: tf.Tensor, values: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        probabilities = context.cast(_masked_softmax(logits, mask))
        if has_custom_gradient and context.training and probabilities.dtype != tf.float32:
            probabilities = optimization_barrier(probabilities, context, platforms=("gpu",))
        dropped = drop(probabilities)
        means = context.checkpoint_name(_weighted_sum(dropped, values, value_axes, context), "hidden", "BTND")

        def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            upstream = context.annotate(upstream, "BTND")
            d_values = tf.einsum(f"BNTL,BTND->{value_axes}", dropped, upstream)
            d_probabilities = drop(tf.einsum(f"BTND,{value_axes}->BNTL", upstream, values))
            shared = tf.reduce_sum(tf.cast(means, tf.float32) * tf.cast(upstream, tf.float32), axis=-1)
            difference = tf.cast(d_probabilities, tf.float32) - tf.einsum("BTN->BNT", shared)[..., None]
            d_logits = tf.cast(probabilities, tf.float32) * difference
            return tf.cast(tf.where(mask[:, None], d_logits, 0.0), logits.dtype), d_values

        return means, gradient

    return named_gradient(mean)(logits, values) if has_custom_gradient else mean(logits, values)[0]


def cached_attention_mean(
    logits: tf.Tensor, mask: tf.Tensor, cached: tf.Tensor, new: tf.Tensor, context: Context
) -> tf.Tensor:
    """Means of cached and of new values, as `attention_mean` without gradient: `[B, T, N, D]`.

    Args:
      logits: `[B, N, T, L + K]`, of the L cached positions and then of the K new ones.
      mask: `[B, T, L + K] bool`.
      cached: values with the logical axes of `CACHED_AXES`, L positions.
      new: values `[B, K, N, D]`.
      context: of the call.
    """
    probabilities = context.cast(_masked_softmax(logits, mask))
    length = cached.shape[CACHED_AXES[1].index("L")]
    before = _weighted_sum(probabilities[..., :length], cached, CACHED_AXES[1], context)
    return context.annotate(before + _weighted_sum(probabilities[..., length:], new, "BLND", context), "BTND")


def _masked_softmax(logits: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    return tf.nn.softmax(tf.where(mask[:, None], tf.cast(logits, tf.float32), MASKED_LOGIT))


def _weighted_sum(weights: tf.Tensor, values: tf.Tensor, value_axes: str, context: Context) -> tf.Tensor:
    """Sums of values, with the logical axes `value_axes`, by weights `[B, N, T, L]`: `[B, T, N, D]`."""
    if not _is_single_query(weights.shape[2], value_axes, CACHED_AXES[1], context):
        return tf.einsum(f"BNTL,{value_axes}->BTND", weights, values)
    weights32, values32 = tf.cast(tf.einsum("BNTL->BNLT", weights), tf.float32), tf.cast(values, tf.float32)
    return tf.cast(tf.reduce_sum(weights32 * values32, axis=2), weights.dtype)[:, None]


def reads_written_cache(context: Context) -> bool:
    """Returns whether attention reads new positions from the cache, to which they are written first.

    A TPU reads a layer's part of a stacked cache in place only if that is written afterwards; otherwise it copies the
    part. On a CPU or GPU, one matmul over the cache takes less time than two.
    """
    return context.platform in ("cpu", "gpu")


def attend_to_written(
    attend: Callable[[int], tf.Tensor], written: tf.Tensor, positions: int, context: Context
) -> tf.Tensor:
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

    chooses = context.is_one_cpu
    return smallest([positions // part for part in _PARTS if positions >= part] if chooses else [])


def _is_single_query(num_queries: int, logical_axes: str, cached_axes: str, context: Context) -> bool:
    return context.platform == "cpu" and num_queries == 1 and logical_axes == cached_axes
