"""Multi-head attention (Vaswani et al. 2017, section 3.2), over whole sequences or over a cache of keys and values."""

from __future__ import annotations

import dataclasses
import math

from lingvo_moe.layers.base import Context, Layer, matrix, project
from lingvo_moe.lazy import tf

_MASKED = -1e9
# How keys and values lie in a cache, which a search reads at every step: as the two products want them, transposed only once.
CACHED = ("BNDL", "BNLD")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiHeadAttention(Layer):
    """Queries from one sequence, keys and values from the same or another one.

    Sharding is by letters: on a 1-D mesh the batch is cut and weights are whole (GShard section 3.2); on a 2-D mesh heads lie
    along y (GSPMD table 1).
    """

    model_dim: int
    num_heads: int
    head_dim: int
    dropout: float = 0.0

    def weights(self) -> dict:
        sizes = {"M": self.model_dim, "N": self.num_heads, "D": self.head_dim}
        return {
            "query": matrix("MND", fan_in="M", **sizes),
            "key": matrix("MND", fan_in="M", **sizes),
            "value": matrix("MND", fan_in="M", **sizes),
            "output": matrix("NDM", fan_in="ND", **sizes),
        }

    def __call__(
        self, theta: dict, queries: tf.Tensor, memory: tf.Tensor, mask: tf.Tensor, context: Context
    ) -> tf.Tensor:
        """Attends from `queries [B, T, M]` to `memory [B, L, M]` where `mask [B, T, L] bool` is true; returns `[B, T, M]`."""
        keys, values = self.keys_values(theta, memory, context)
        return self.attend(theta, queries, keys, values, mask, context)

    def keys_values(self, theta: dict, memory: tf.Tensor, context: Context) -> tuple[tf.Tensor, tf.Tensor]:
        """`[B, L, M]` to keys and values, each `[B, L, N, D]`."""
        keys = project(memory, theta["key"], context)
        values = project(memory, theta["value"], context)
        return context.checkpoint_name(keys, "hidden", "BLND"), context.checkpoint_name(values, "hidden", "BLND")

    def attend(
        self,
        theta: dict,
        queries: tf.Tensor,
        keys: tf.Tensor,
        values: tf.Tensor,
        mask: tf.Tensor,
        context: Context,
        logical_axes: tuple[str, str] = ("BLND", "BLND"),
    ) -> tf.Tensor:
        """As `__call__`, with keys and values of these `letters` at hand. A query that may see nothing gets a mean of all."""
        of_keys, of_values = logical_axes
        projected = project(queries, theta["query"], context) * (1.0 / math.sqrt(self.head_dim))
        projected = context.checkpoint_name(projected, "hidden", "BTND")
        alone = context.platform == "cpu" and queries.shape[1] == 1 and logical_axes == CACHED
        logits = tf.cast((_logits_of_one if alone else _logits)(projected, keys, of_keys), tf.float32)
        logits = tf.where(mask[:, None], context.annotate(logits, "BNTL"), _MASKED)
        shares = context.cast(tf.nn.softmax(logits))
        shares = context.dropout(shares, self.dropout, "attention", "BNTL")
        attended = context.checkpoint_name(
            (_mean_of_one if alone else _mean)(shares, values, of_values), "hidden", "BTND"
        )
        outputs = project(attended, theta["output"], context, contracted=2)
        return context.checkpoint_name(outputs, "output", "BTM")


def _logits(queries: tf.Tensor, keys: tf.Tensor, logical_axes: str) -> tf.Tensor:
    """`[B, T, N, D]`, and keys of these `letters`, to `[B, N, T, L]`."""
    return tf.einsum(f"BTND,{logical_axes}->BNTL", queries, keys)


def _logits_of_one(query: tf.Tensor, keys: tf.Tensor, logical_axes: str) -> tf.Tensor:
    """`_logits` where T is 1 and keys are `BNDL`, in float32: a CPU is slow at the product of a row and a matrix."""
    del logical_axes
    query, keys = tf.cast(tf.einsum("BTND->BNDT", query), tf.float32), tf.cast(keys, tf.float32)
    return tf.reduce_sum(query * keys, axis=2)[:, :, None]


def _mean(shares: tf.Tensor, values: tf.Tensor, logical_axes: str) -> tf.Tensor:
    """`[B, N, T, L]`, and values of these `letters`, to `[B, T, N, D]`."""
    return tf.einsum(f"BNTL,{logical_axes}->BTND", shares, values)


def _mean_of_one(shares: tf.Tensor, values: tf.Tensor, logical_axes: str) -> tf.Tensor:
    """`_mean` where T is 1 and values are `BNLD`, see `_logits_of_one`."""
    del logical_axes
    wide, values = tf.cast(tf.einsum("BNTL->BNLT", shares), tf.float32), tf.cast(values, tf.float32)
    return tf.cast(tf.reduce_sum(wide * values, axis=2), shares.dtype)[:, None]


def segment_mask(query_segments: tf.Tensor, key_segments: tf.Tensor) -> tf.Tensor:
    """Which tokens may see which: `[B, T]` and `[B, L] int32` to `[B, T, L] bool`.

    A token sees the tokens of its own segment; segment 0 is padding and is seen by nobody.
    """
    same = tf.equal(query_segments[:, :, None], key_segments[:, None, :])
    return tf.logical_and(same, tf.not_equal(key_segments, 0)[:, None, :])


def causal_mask(segments: tf.Tensor) -> tf.Tensor:
    """As `segment_mask` within one sequence `[B, T]`, and no token sees a later one."""
    length = segments.shape[1]
    earlier = tf.range(length)[:, None] >= tf.range(length)[None, :]
    return tf.logical_and(segment_mask(segments, segments), earlier[None])
