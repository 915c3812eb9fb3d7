"""The largest of each row: what gating and searching choose by."""

from __future__ import annotations

import math

from lingvo_moe.lazy import tf


def largest(values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The largest of `[..., N]` and the first place where it stands, `[...] int32`; the last place in a row that has a NaN.

    Two plain reductions, which a CPU's vector units do; argmax reduces pairs, which they do not.
    """
    best, places = tf.reduce_max(values, axis=-1), tf.range(values.shape[-1])
    return best, tf.reduce_min(tf.where(tf.equal(values, best[..., None]), places, values.shape[-1] - 1), axis=-1)


def largest_few(values: tf.Tensor, count: int) -> tuple[tf.Tensor, tf.Tensor]:
    """The `count` largest of each row of `[B, N]`, falling, ties by the lower index: values, and indices `int32`, `[B, count]`.

    Where fewer than `count` are above minus infinity, an index may come a second time, with minus infinity.

    It makes `count` passes over the largest of each piece of a row, and as many over the pieces that hold those: among them are all
    that are asked for. On every backend that is far less work than the sort that a general top-k becomes, and a pass is cut along
    the batch by the partitioner.
    """
    rows, size = values.shape
    length = _piece(size, count)
    pieces = tf.reshape(values, (rows, size // length, length))
    _, places = _by_passes(tf.reduce_max(pieces, axis=-1), tf.range(size // length)[None], count)
    candidates = tf.reshape(tf.gather(pieces, places, batch_dims=1), (rows, count * length))
    indices = tf.reshape(places[..., None] * length + tf.range(length), (rows, count * length))
    return _by_passes(candidates, indices, count)


def _piece(size: int, count: int) -> int:
    """The divisor of `size` with which `size` / piece + `count` * piece is least."""
    divisors = [divisor for divisor in range(1, math.isqrt(size) + 1) if size % divisor == 0]
    return min(divisors, key=lambda length: size // length + count * length)


def _by_passes(values: tf.Tensor, indices: tf.Tensor, count: int) -> tuple[tf.Tensor, tf.Tensor]:
    """The `count` largest of `values [B, N]`, and the `indices [B or 1, N]` that they have; ties by the lower index."""
    best, found = [], []
    for _ in range(count):
        best.append(tf.reduce_max(values, axis=-1))
        # In a row that has a NaN nothing is equal to the largest.
        here = tf.where(tf.equal(values, best[-1][:, None]), indices, tf.reduce_max(indices, axis=-1, keepdims=True))
        found.append(tf.reduce_min(here, axis=-1))
        values = tf.where(tf.equal(indices, found[-1][:, None]), -float("inf"), values)
    return tf.stack(best, axis=-1), tf.stack(found, axis=-1)
