"""The largest elements of each row, for routing and beam search, in the form that is fastest on the platform."""

from __future__ import annotations

import dataclasses
import math

from lingvo_moe.lazy import tf
from lingvo_moe.ops.context import Context


def max_with_index(values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The largest of `[..., N]` and its first index, `[...] int32`; any index within a row that has a NaN.

    Two plain reductions, which vector units compute; argmax reduces pairs, which a CPU's do not.
    """
    best = tf.reduce_max(values, axis=-1)
    return best, _first_index(tf.equal(values, best[..., None]))


def top_k(values: tf.Tensor, count: int, context: Context) -> tuple[tf.Tensor, tf.Tensor]:
    """The `count` largest of each row, descending; of equal ones, the lower index first.

    A general top-k is a sort, except on a CPU, for which XLA has a kernel for few elements (it orders 0 before -0).
    Elsewhere `count` passes over the rows are far less work. The partitioner shards both forms along the batch.

    Args:
      values: `[B, N]`. In a row that has a NaN, the indices are arbitrary but within the row.
      count: how many.
      context: of the call.

    Returns:
      Values and `int32` indices, `[B, count]`.
    """
    if context.platform == "cpu":
        return tf.math.top_k(values, count)
    best, indices, left = [], [], tf.ones_like(values, tf.bool)
    for _ in range(count):
        best.append(tf.reduce_max(tf.where(left, values, -float("inf")), axis=-1))
        # `left` also keeps an element of minus infinity from being selected twice.
        indices.append(_first_index(tf.logical_and(left, tf.equal(values, best[-1][:, None]))))
        left = tf.logical_and(left, tf.not_equal(tf.range(values.shape[-1]), indices[-1][:, None]))
    return tf.stack(best, axis=-1), tf.stack(indices, axis=-1)


def _first_index(mask: tf.Tensor) -> tf.Tensor:
    """The first index of `[..., N] bool` that is true, `[...] int32`; the last index where none is."""
    size = mask.shape[-1]
    return tf.reduce_min(tf.where(mask, tf.range(size), size - 1), axis=-1)


@dataclasses.dataclass(frozen=True)
class VocabularyChunks:
    """Rows `[B, K, V]` split into chunks, to find the few largest elements without reading the rest again.

    The few largest elements of a row are in the few chunks with the largest maxima.

    Attributes:
      values: `[B, K, P, L]`, P chunks of L elements.
      maxima: the largest of each chunk, `[B, K, P]`.
    """

    values: tf.Tensor
    maxima: tf.Tensor

    @classmethod
    def of(cls, values: tf.Tensor, count: int) -> VocabularyChunks:
        """Splits `[B, K, V]` so that finding the `count` largest is least work."""
        batch, rows, size = values.shape
        divisors = [divisor for divisor in range(1, math.isqrt(size) + 1) if size % divisor == 0]
        length = min(divisors, key=lambda length: rows * size // length + count * length)
        chunks = tf.reshape(values, (batch, rows, size // length, length))
        return cls(chunks, tf.reduce_max(chunks, axis=-1))

    def largest(self) -> tf.Tensor:
        """The largest of each row, `[B, K]`."""
        return tf.reduce_max(self.maxima, axis=-1)

    def top_k_sums(self, offsets: tf.Tensor, count: int, context: Context) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns `top_k` of values + offsets, over all K rows of a batch element together.

        Args:
          offsets: `[B, K]`, added to all elements of a row.
          count: how many.
          context: of the call.

        Returns:
          Sums and `int32` indices, `[B, count]`; index k * V + v is element v of row k.
        """
        batch, rows, chunks, length = self.values.shape
        # The sum of the largest is the largest sum, for sums are rounded alike.
        _, chosen = top_k(tf.reshape(self.maxima + offsets[..., None], (batch, rows * chunks)), count, context)
        chosen = tf.sort(chosen)  # so that of equal candidates the one of the lower index comes first
        candidates = tf.gather(tf.reshape(self.values, (batch, rows * chunks, length)), chosen, batch_dims=1)
        sums = candidates + tf.gather(offsets, chosen // chunks, batch_dims=1)[..., None]
        indices = tf.reshape(chosen[..., None] * length + tf.range(length), (batch, count * length))
        best, order = top_k(tf.reshape(sums, (batch, count * length)), count, context)
        return best, tf.gather(indices, order, batch_dims=1)
