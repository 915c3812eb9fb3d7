"""Multi-head attention (Vaswani et al. 2017, section 3.2), over whole sequences or over a KV cache."""

from __future__ import annotations

import dataclasses
import functools
import math

from lingvo_moe.layers.base import Context, Layer, Weight, matrix
from lingvo_moe.lazy import tf
from lingvo_moe.ops.attention import CACHED_AXES, attention_logits, attention_mean, cached_attention_mean
from lingvo_moe.ops.projection import prepare_weight, project


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiHeadAttention(Layer):
    """Queries from one sequence, keys and values from the same or another one.

    On a 1-D mesh the batch is sharded and weights are replicated (GShard section 3.2); on a 2-D mesh heads are sharded
    along y (GSPMD table 1).

    Attributes:
      model_dim: M.
      num_heads: N.
      head_dim: D.
      dropout: of the attention probabilities.
      twin_keys: whether the projection of keys starts equal to that of queries (Trockman and Kolter 2023). A query then
        attends from the first step on to what is like itself: to the same position, and with tied embeddings to the
        same word.
      biases: whether the four projections have a bias; that of keys, which has no effect, is not trained.
    """

    model_dim: int
    num_heads: int
    head_dim: int
    dropout: float = 0.0
    twin_keys: bool = False
    biases: bool = False

    def weights(self) -> dict:
        """See `Layer.weights`."""
        sizes = {"M": self.model_dim, "N": self.num_heads, "D": self.head_dim}
        matrices = {
            "query": matrix("MND", fan_in="M", **sizes),
            "key": dataclasses.replace(matrix("MND", fan_in="M", **sizes), twin="query" if self.twin_keys else ""),
            "value": matrix("MND", fan_in="M", **sizes),
            "output": matrix("NDM", fan_in="ND", **sizes),
        }
        if not self.biases:
            return matrices
        of_heads = Weight((self.num_heads, self.head_dim), "ND")
        biases = dict.fromkeys(("query_bias", "key_bias", "value_bias"), of_heads)
        return {**matrices, **biases, "output_bias": Weight((self.model_dim,), "M")}

    def prepare_decoding(self, theta: dict, context: Context) -> dict:
        """See `Layer.prepare_decoding`."""
        contracted = {"query": 1, "key": 1, "value": 1, "output": 2}
        return {**theta, **{name: prepare_weight(theta[name], context, each) for name, each in contracted.items()}}

    def __call__(
        self,
        theta: dict,
        queries: tf.Tensor,
        memory: tf.Tensor,
        mask: tf.Tensor,
        context: Context,
        bias: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Attends from `queries [B, T, M]` to `memory [B, L, M]` where `mask [B, T, L] bool` is true: `[B, T, M]`.

        `bias [N, T, L] float32` is added to the logits, see `relative_bias`. T may be 1: all queries then have the
        same bias.
        """
        keys, values = self.keys_values(theta, memory, context)
        return self.attend(theta, queries, keys, values, mask, context, bias=bias)

    def keys_values(self, theta: dict, memory: tf.Tensor, context: Context) -> tuple[tf.Tensor, tf.Tensor]:
        """`[B, L, M]` to keys and values, each `[B, L, N, D]`."""
        bias = theta.get("key_bias")
        # It adds the same to all logits of a query, so a softmax does not change, and its gradient is 0. Computed, that
        # would be rounding errors, which Adafactor would scale to updates as large as others.
        bias = None if bias is None else tf.stop_gradient(bias)
        keys = project(memory, theta["key"], context, bias=bias)
        values = project(memory, theta["value"], context, bias=theta.get("value_bias"))
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
        bias: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Computes what `__call__` does, from keys and values; a query that sees no key gets the mean of all values.

        Args:
          theta: tensors for `weights()`.
          queries: `[B, T, M]`.
          keys: with the dimensions of the first of `logical_axes`.
          values: with those of the second.
          mask: `[B, T, L] bool`, which keys a query sees.
          context: of the call.
          logical_axes: of the keys and the values, permutations of `BLND`.
          bias: `[N, T, L]`, or `[N, 1, L]`, `float32`, added to the logits.

        Returns:
          `[B, T, M]`.
        """
        key_axes, value_axes = logical_axes
        projected = self._queries(theta, queries, context)
        logits = _biased(self.logits(theta, projected, keys, key_axes, context), bias)
        drop = functools.partial(context.dropout, rate=self.dropout, key="attention", logical_axes="BNTL")
        attended = attention_mean(logits, mask, values, value_axes, drop, context)
        return context.checkpoint_name(self._outputs(theta, attended, context), "output", "BTM")

    def attend_cached(
        self,
        theta: dict,
        queries: tf.Tensor,
        cached: tuple[tf.Tensor, tf.Tensor],
        new: tuple[tf.Tensor, tf.Tensor],
        mask: tf.Tensor,
        start: tf.Tensor,
        context: Context,
        bias: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Attends from `queries [B, K, M]` to a cache and to K new positions, which are not in it yet: `[B, K, M]`.

        Args:
          theta: tensors for `weights()`.
          queries: those of the new positions.
          cached: keys and values with the logical axes `CACHED_AXES`.
          new: keys and values of the new positions, each `[B, K, N, D]`.
          mask: `[B, K, L] bool` over the cache, in which start .. start + K - 1 are the new positions.
          start: scalar; of the cache, the positions before it are read.
          context: of the call.
          bias: `[N, K, L]` or `[N, 1, L]`, float32, over the same positions as the mask.
        """
        (cached_keys, cached_values), (keys, values) = cached, new
        projected = self._queries(theta, queries, context)
        logits = tf.concat(
            [
                self.logits(theta, projected, cached_keys, CACHED_AXES[0], context),
                self.logits(theta, projected, keys, "BLND", context),
            ],
            axis=-1,
        )
        is_before, new_positions = tf.range(mask.shape[2]) < start, start + tf.range(queries.shape[1])
        seen = tf.concat([tf.logical_and(mask, is_before), tf.gather(mask, new_positions, axis=2)], axis=2)
        if bias is not None:
            logits = _biased(logits, tf.concat([bias, tf.gather(bias, new_positions, axis=2)], axis=2))
        attended = cached_attention_mean(logits, seen, cached_values, values, context)
        return context.annotate(self._outputs(theta, attended, context), "BTM")

    def _outputs(self, theta: dict, attended: tf.Tensor, context: Context) -> tf.Tensor:
        """The projected means of values, `[B, T, N, D]` to `[B, T, M]`."""
        return project(attended, theta["output"], context, contracted=2, bias=theta.get("output_bias"))

    def _queries(self, theta: dict, queries: tf.Tensor, context: Context) -> tf.Tensor:
        """The projected queries, divided by the root of D: `[B, T, N, D]`."""
        projected = project(queries, theta["query"], context, bias=theta.get("query_bias"))
        return context.checkpoint_name(projected * (1.0 / math.sqrt(self.head_dim)), "hidden", "BTND")

    def logits(self, theta: dict, queries: tf.Tensor, keys: tf.Tensor, key_axes: str, context: Context) -> tf.Tensor:
        """Products of queries `[B, T, N, D]`, divided by the root of D, and keys: `[B, N, T, L]`."""
        del theta  # positions are in the inputs
        return attention_logits(queries, keys, key_axes, context)


def _biased(logits: tf.Tensor, bias: tf.Tensor | None) -> tf.Tensor:
    """Logits `[B, N, T, L]` with the bias, in its float32: the softmax after it takes that, too."""
    return logits if bias is None else tf.cast(logits, tf.float32) + bias


def segment_mask(query_segments: tf.Tensor, key_segments: tf.Tensor) -> tf.Tensor:
    """Which tokens see which: `[B, T]` and `[B, L] int32` to `[B, T, L] bool`.

    A token sees the tokens of its own segment; no token sees segment 0, which is padding.
    """
    same = tf.equal(query_segments[:, :, None], key_segments[:, None, :])
    return tf.logical_and(same, tf.not_equal(key_segments, 0)[:, None, :])


def causal_mask(segments: tf.Tensor) -> tf.Tensor:
    """`segment_mask` within one sequence `[B, T]`, where no token sees a later one: `[B, T, T] bool`."""
    length = segments.shape[1]
    earlier = tf.range(length)[:, None] >= tf.range(length)[None, :]
    return tf.logical_and(segment_mask(segments, segments), earlier[None])
