"""Transposition in tiles, for CPUs."""

from __future__ import annotations

import math

from lingvo_moe.lazy import tf

_SIDE = 8  # of a tile


def transpose(tensor: tf.Tensor, devices: int = 1) -> tf.Tensor:
    """`[..., A, B]` to `[..., B, A]`, tile by tile: XLA would fuse a plain transposition into the matmul after it.

    Each dimension may be sharded over up to `devices` devices: a tile never lies on two.
    """
    *leading, height, width = tensor.shape
    a, b = _side(height, devices), _side(width, devices)
    count = len(leading)
    order = (*range(count), count + 2, count + 3, count, count + 1)
    tiles = tf.transpose(tf.reshape(tensor, (*leading, height // a, a, width // b, b)), order)
    return tf.reshape(tiles, (*leading, width, height))


def _side(length: int, devices: int) -> int:
    return math.gcd(length // devices, _SIDE) if length % devices == 0 else 1
