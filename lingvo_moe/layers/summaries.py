"""Summaries of layers: the magnitude of activations, the entropy of routers.

`Context.summarize` adds them to the context's collector. Only `diagnose` has one; other programs compute no summaries.
"""

from __future__ import annotations

from collections.abc import Mapping

from lingvo_moe.lazy import tf
from lingvo_moe.ops.context import Context


class SummaryCollector:
    """Collects summaries.

    Attributes:
      values: float32 tensors by name, in the order in which they were added: scalars; of repeated layers, `[R]`.
    """

    def __init__(self):
        self.values: dict[str, tf.Tensor] = {}

    def __call__(self, name: str, value: tf.Tensor):
        """Adds a summary, through which no gradient flows; raises ValueError where there is one of that name."""
        if name in self.values:
            raise ValueError(f"summary {name} is added twice; give each call a scope of its own, with Context.named.")
        self.values[name] = tf.stop_gradient(tf.cast(value, tf.float32))


def collector_for(context: Context) -> SummaryCollector | None:
    """A collector of the summaries of one repeated layer; None where the context's summaries are off."""
    return SummaryCollector() if context.add_summary else None


def add_summaries(context: Context, summaries: Mapping[str, tf.Tensor]):
    """Adds those of repeated layers, `[R]` by name, to the context's; nothing where these are off."""
    if context.add_summary:
        for name, values in summaries.items():
            context.add_summary(name, values)


def magnitude(tensor: tf.Tensor) -> dict[str, tf.Tensor]:
    """`rms`, the root mean square, and `max`, the largest absolute value, of all elements."""
    axes = range(tensor.shape.rank)
    return {"rms": root_mean_square(tensor, axes), "max": largest_magnitude(tensor, axes)}


def router_entropy(gates: tf.Tensor, paddings: tf.Tensor) -> dict[str, tf.Tensor]:
    """Entropies of a router, in nats; 0 if one expert has the whole probability, log E if the gates are equal.

    Neither says anything about dropped tokens.

    Args:
      gates: `[G, S, E] float32`, softmax over experts, whichever gates the router itself computes.
      paddings: `[G, S] bool`, positions that do not count.

    Returns:
      `router_entropy`, of a token's gates, mean over tokens: low where few experts have most of it.
      `load_entropy`, of the gates' mean over tokens: low where they prefer the same experts for all tokens.
    """
    tokens = tf.reduce_sum(tf.cast(tf.logical_not(paddings), tf.float32))
    gates = tf.where(paddings[..., None], 0.0, gates)
    load = tf.math.divide_no_nan(tf.reduce_sum(gates, axis=(0, 1)), tokens)
    router_entropy = tf.math.divide_no_nan(tf.reduce_sum(_entropy(gates)), tokens)
    return {"router_entropy": router_entropy, "load_entropy": _entropy(load)}


def largest_magnitude(tensor: tf.Tensor, axes) -> tf.Tensor:
    """The largest absolute value along `axes`, float32; NaN where there is one."""
    size = tf.abs(tf.cast(tensor, tf.float32))
    # The compiler decides whether a maximum of numbers and NaN is NaN.
    return tf.where(
        tf.reduce_any(tf.math.is_nan(size), axis=list(axes)), float("nan"), tf.reduce_max(size, axis=list(axes))
    )


def larger(first: tf.Tensor, second: tf.Tensor) -> tf.Tensor:
    """The larger element of two tensors that can be broadcast; NaN where one of them is, see `largest_magnitude`."""
    is_nan = tf.math.is_nan(first) | tf.math.is_nan(second)
    return tf.where(is_nan, float("nan"), tf.maximum(first, second))


def norm(tensor: tf.Tensor, axes) -> tf.Tensor:
    """The root of the sum of squares along `axes`, float32; finite where the root is, even if the squares are not."""
    return _scaled_root(tensor, list(axes), tf.reduce_sum)


def root_mean_square(tensor: tf.Tensor, axes) -> tf.Tensor:
    """The root of the mean square along `axes`, as `norm`."""
    return _scaled_root(tensor, list(axes), tf.reduce_mean)


def _scaled_root(tensor: tf.Tensor, axes: list[int], reduce) -> tf.Tensor:
    tensor32, scale = tf.cast(tensor, tf.float32), largest_magnitude(tensor, axes)
    spread = tf.reshape(scale, [1 if axis in axes else size for axis, size in enumerate(tensor.shape)])
    root = scale * tf.sqrt(reduce(tf.square(tf.math.divide_no_nan(tensor32, spread)), axis=axes))
    return tf.where(tf.math.is_finite(scale), root, scale)


def _entropy(shares: tf.Tensor) -> tf.Tensor:
    return -tf.reduce_sum(tf.math.xlogy(shares, shares), axis=-1)
