"""The largest of each row: what gating and searching choose by."""

from __future__ import annotations

import dataclasses
import math

from lingvo_moe.layers.base import Context
from lingvo_moe.lazy import tf


def largest(values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The largest of `[..., N]` and the first place where it stands, `[...] int32`; the last place in a row that has a NaN.

    Two plain reductions, which a CPU's vector units do; argmax reduces pairs, which they do not.
    """
    best = tf.reduce_max(values, axis=-1)
    return best, _first(tf.equal(values, best[..., None]))


def largest_few(values: tf.Tensor, count: int, context: Context) -> tuple[tf.Tensor, tf.Tensor]:
    """The `count` largest of each row of `[B, N]`, falling, ties by the lower index: values, and indices `int32`, `[B, count]`.

    A general top-k is a sort, but for a CPU, for which XLA has one of a few (with 0 before -0). Elsewhere it is `count` passes over
    the rows, which are far less work. The partitioner cuts both along the batch. In a row that has a NaN, indices are places of it.
    """
    if context.platform == "cpu":
        return tf.math.top_k(values, count)
    best, found, left = [], [], tf.ones_like(values, tf.bool)
    for _ in range(count):
        best.append(tf.reduce_max(tf.where(left, values, -float("inf")), axis=-1))
        # Minus infinity, too, is found once in each place.
        found.append(_first(tf.logical_and(left, tf.equal(values, best[-1][:, None]))))
        left = tf.logical_and(left, tf.not_equal(tf.range(values.shape[-1]), found[-1][:, None]))
    return tf.stack(best, axis=-1), tf.stack(found, axis=-1)


def _first(true: tf.Tensor) -> tf.Tensor:
    """The first place of `[..., N]` where it is true, `[...] int32`; the last place where it nowhere is."""
    size = true.shape[-1]
    return tf.reduce_min(tf.where(true, tf.range(size), size - 1), axis=-1)


@dataclasses.dataclass(frozen=True)
class VocabularyChunks:
    """Rows `[B, K, V]` cut into pieces: the few largest of all are in the few pieces of the largest peaks, so they are found
    without another look at the rest.

    Attributes:
      values: `[B, K, P, L]`.
      peaks: the largest of each piece, `[B, K, P]`.
    """

    values: tf.Tensor
    peaks: tf.Tensor

    @classmethod
    def of(cls, values: tf.Tensor, count: int) -> VocabularyChunks:
        """Cuts `[B, K, V]` so that finding the `count` largest is least work."""
        batch, rows, size = values.shape
        divisors = [divisor for divisor in range(1, math.isqrt(size) + 1) if size % divisor == 0]
        length = min(divisors, key=lambda length: rows * size // length + count * length)
        pieces = tf.reshape(values, (batch, rows, size // length, length))
        return cls(pieces, tf.reduce_max(pieces, axis=-1))

    def largest(self) -> tf.Tensor:
        """The largest of each row, `[B, K]`."""
        return tf.reduce_max(self.peaks, axis=-1)

    def largest_few_sums(self, offsets: tf.Tensor, count: int, context: Context) -> tuple[tf.Tensor, tf.Tensor]:
        """As `largest_few` of values + offsets `[B, K]`, all rows of a batch in one, `[B, K * V]`."""
        batch, rows, pieces, length = self.values.shape
        # The sum of the largest is the largest sum, for sums are rounded alike.
        _, chosen = largest_few(tf.reshape(self.peaks + offsets[..., None], (batch, rows * pieces)), count, context)
        chosen = tf.sort(chosen)  # so that of equal candidates the one of the lower index stands first
        candidates = tf.gather(tf.reshape(self.values, (batch, rows * pieces, length)), chosen, batch_dims=1)
        sums = candidates + tf.gather(offsets, chosen // pieces, batch_dims=1)[..., None]
        indices = tf.reshape(chosen[..., None] * length + tf.range(length), (batch, count * length))
        best, places = largest_few(tf.reshape(sums, (batch, count * length)), count, context)
        return best, tf.gather(indices, places, batch_dims=1)
