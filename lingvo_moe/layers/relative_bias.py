"""Relative position bias (Raffel et al. 2020, T5, section 2.1): a learnt number for each head and bucket of distances.

It is added to the logits of self-attention, and the positions of a model that has it are in nothing else. Near keys
have a bucket for each distance, those farther away share buckets that widen in proportion to the distance. It has no
vectors and no products, unlike the relative positions of a Conformer (`relative_attention`).
"""

from __future__ import annotations

import bisect
import dataclasses
import math

from lingvo_moe.layers.base import Context, Layer, Weight
from lingvo_moe.lazy import tf


@dataclasses.dataclass(frozen=True, kw_only=True)
class RelativeBias(Layer):
    """The bias of all layers of one stack, which share its table.

    Attributes:
      model_dim: M; the initial values are as those of an embedding's table.
      num_heads: N.
      buckets: of the table; if it is bidirectional, an even number of them, half for the keys after a query.
      distance: at and beyond it, all keys of one side share the last bucket; more than half of `buckets`.
      bidirectional: whether queries see keys after them, as in an encoder; otherwise the bias of these has no meaning.
    """

    model_dim: int
    num_heads: int
    buckets: int
    distance: int
    bidirectional: bool

    def weights(self) -> dict:
        """See `Layer.weights`."""
        shape, stddev = (self.buckets, self.num_heads), 1.0 / math.sqrt(self.model_dim)
        return {"relative_bias": Weight(shape, "lN", stddev=stddev, keep_float32=True)}

    def __call__(self, theta: dict, queries: tf.Tensor, keys: tf.Tensor, context: Context) -> tf.Tensor:
        """The bias of each pair of positions.

        In packed rows, an index in the row can be the position: within a sentence, differences are the same.

        Args:
          theta: tensors for `weights()`.
          queries: `[T] int32`, their positions.
          keys: `[L] int32`, theirs.
          context: of the call.

        Returns:
          `[N, T, L] float32`.
        """
        with tf.name_scope("self_attention"):
            vectors = tf.gather(theta["relative_bias"], self._buckets_of(keys[None, :] - queries[:, None]))
            return context.annotate(tf.einsum("TLN->NTL", vectors), "NTL")

    def _buckets_of(self, offsets: tf.Tensor) -> tf.Tensor:
        """The buckets `[T, L] int32` of keys at offsets `[T, L] int32` from the query, negative before it."""
        of_side = self.buckets // 2 if self.bidirectional else self.buckets
        distances = tf.abs(offsets) if self.bidirectional else tf.maximum(-offsets, 0)
        is_from = distances[..., None] >= tf.constant(first_distances(of_side, self.distance))
        buckets = tf.reduce_sum(tf.cast(is_from, tf.int32), axis=-1)
        return tf.where(offsets > 0, buckets + of_side, buckets) if self.bidirectional else buckets


def first_distances(buckets: int, distance: int) -> list[int]:
    """The least distance of each bucket but the first: half of them have one each, the others widen geometrically.

    T5's code takes logarithms in float32. These are integers, so each platform has the same buckets, also of a distance
    where one ends.

    Args:
      buckets: n, at least 2.
      distance: at and beyond it, all have the last bucket; more than n / 2.

    Returns:
      n - 1 distances, in ascending order.
    """
    exact = buckets // 2
    wide = buckets - exact

    def first(k: int) -> int:
        """The least integer from exact (distance / exact)^(k / wide) on, both to the power of `wide`."""
        bound = distance**k * exact ** (wide - k)
        return bisect.bisect_left(range(distance), bound, key=lambda far: far**wide)

    return [*range(1, exact + 1), *(first(k) for k in range(1, wide))]
