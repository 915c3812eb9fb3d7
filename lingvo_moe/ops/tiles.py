"""Transposition in tiles, for CPUs."""

from __future__ import annotations

import math

from lingvo_moe.lazy import tf

_SIDE = 8  # of a tile


def transpose(tensor: tf.Tensor) -> tf.Tensor:
    """`[..., A, B]` to `[..., B, A]`, tile by tile: XLA would fuse a plain transposition into the product after it."""
    *leading, height, width = tensor.shape
    a, b = math.gcd(height, _SIDE), math.gcd(width, _SIDE)
    count = len(leading)
    order = (*range(count), count + 2, count + 3, count, count + 1)
    tiles = tf.transpose(tf.reshape(tensor, (*leading, height // a, a, width // b, b)), order)
    return tf.reshape(tiles, (*leading, width, height))
