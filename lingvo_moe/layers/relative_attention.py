"""Self-attention with relative positions (Dai et al. 2019, Transformer-XL, section 3.3), as the Conformer's.

The logit of query i and key j is (q_i / sqrt(D) + u) k_j + (q_i / sqrt(D) + v) R(i - j): by content and by distance.
Dai et al. divide the sum, so that their u and v are sqrt(D) times these; Lingvo's Conformer divides the queries, too.
R(d) is a vector of sines and cosines of d. Dai et al. multiply R by a matrix of M^2 weights; here it has the size of a
head and no matrix. With one, the models of GSPMD's table 5 would have 6.75B and 13.5B weights, where it prints 6.47B
and 12.95B.

Sines and cosines of a difference are products of those of i and j, so (q_i + v) R(i - j) is the product of q_i + v,
rotated by i, and of R(j). It costs as much as the matmul with keys, and no `[T, 2 T - 1]` logits are shifted.
"""

from __future__ import annotations

import dataclasses

from lingvo_moe.errors import UserError
from lingvo_moe.layers.attention import MultiHeadAttention
from lingvo_moe.layers.base import Context, Weight
from lingvo_moe.layers.embedding import sinusoids
from lingvo_moe.lazy import tf


@dataclasses.dataclass(frozen=True, kw_only=True)
class RelativeAttention(MultiHeadAttention):
    """Attention from a sequence to itself, whose logits depend on the distance of the positions.

    Raises:
      UserError: a head of odd size, which has no pairs of a sine and a cosine.
    """

    def __post_init__(self):
        if self.head_dim % 2:
            raise UserError(
                f"head_dim is {self.head_dim}; relative positions are pairs of a sine and a cosine, so it must be even."
            )

    def weights(self) -> dict:
        """See `Layer.weights`; `content_bias` is u and `position_bias` v of Dai et al., divided by sqrt(D)."""
        bias = Weight((self.num_heads, self.head_dim), "ND")
        return {**super().weights(), "content_bias": bias, "position_bias": bias}

    def logits(self, theta: dict, queries: tf.Tensor, keys: tf.Tensor, key_axes: str, context: Context) -> tf.Tensor:
        """See `MultiHeadAttention.logits`; the biases are added to the divided queries."""
        by_content = super().logits(theta, queries + context.cast(theta["content_bias"]), keys, key_axes, context)
        waves = sinusoids(tf.range(queries.shape[1])[None], self.head_dim)[0]
        rotated = _rotated(queries + context.cast(theta["position_bias"]), context.cast(waves)[:, None])
        return by_content + tf.einsum("BTND,LD->BNTL", rotated, context.cast(waves))


def _rotated(queries: tf.Tensor, waves: tf.Tensor) -> tf.Tensor:
    """Queries `[B, T, N, D]` whose product with R(j) is that of the given ones with R(i - j); waves `[T, 1, D]`."""
    of_sines, of_cosines = tf.split(queries, 2, axis=-1)
    sines, cosines = tf.split(waves, 2, axis=-1)
    return tf.concat([of_cosines * sines - of_sines * cosines, of_sines * sines + of_cosines * cosines], axis=-1)
