"""The largest of each row: what gating and searching choose by."""

from __future__ import annotations

from lingvo_moe.lazy import tf


def largest(values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The largest of `[..., N]` and the first place where it stands, `[...] int32`; the last place in a row that has a NaN.

    Two plain reductions, which a CPU's vector units do; argmax reduces pairs, which they do not.
    """
    best, places = tf.reduce_max(values, axis=-1), tf.range(values.shape[-1])
    return best, tf.reduce_min(tf.where(tf.equal(values, best[..., None]), places, values.shape[-1] - 1), axis=-1)
