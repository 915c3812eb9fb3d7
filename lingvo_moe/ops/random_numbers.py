"""Counter-based random numbers: a hash of (seed, index of the element).

XLA's own generators are computed in full on every device and sliced. This one consists of a counter and elementwise
operators, which the partitioner shards: no device holds the numbers of another, and they are the same bits on any
number of devices.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable

from lingvo_moe.lazy import tf

# Threefry-2x32 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011, section 3 and table
# 2). 13 rounds are the fewest the authors call crush-resistant; 20, their default, cost half as much again.
_ROUNDS = 13
_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
_PARITY = 0x1BD11BDA
_WORD = 2**32


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a tensor, consecutive along its first dimension, whose random numbers are drawn.

    Attributes:
      first: the index of the first one, a scalar int32.
      total: of the whole tensor.
    """

    first: tf.Tensor
    total: int


def uniform(seed: tf.Tensor, shape: tuple[int, ...], rows: Rows | None = None) -> tf.Tensor:
    """Returns float32 numbers in [0, 1), multiples of 2^-24, of the given shape under the `[2] int32` seed.

    With `rows`, these are some rows of the tensor that has all of them: the same numbers as there.
    """
    return _drawn()(seed, *_counters(shape, rows))


def uniform_by_row(seeds: tf.Tensor, shape: tuple[int, ...], number: tf.Tensor) -> tf.Tensor:
    """Returns float32 numbers in [0, 1), multiples of 2^-24, `[B, *shape]`: row b has those of its own seed.

    Args:
      seeds: `[B, 2] int32`.
      shape: of a row, of at most 2^32 elements.
      number: scalar int32; each number gives other random numbers under the same seeds.
    """
    seeds = tf.reshape(tf.transpose(seeds), (2, -1, *(1 for _ in shape)))
    index, _ = _counters((1, *shape))
    return _drawn()(seeds, index, tf.cast(number, tf.uint32))


def fold_seed(seed: tf.Tensor, key: str | int | tf.Tensor) -> tf.Tensor:
    """Returns the `[2] int32` seed of a name or a number under `seed`."""
    number = _constant(zlib.crc32(key.encode())) if isinstance(key, str) else tf.cast(key, tf.uint32)
    return _folded()(seed, number)


# Graph functions are traced once per shape, and called: inlined, their operators were most of a graph. Counters are
# arguments: inside, they would be constants, which TensorFlow computes on the host, in full, when it lowers the caller.
@functools.cache
def _drawn() -> Callable:
    """Returns the function from a seed and counters to `uniform`'s numbers."""

    def draw(seed: tf.Tensor, first: tf.Tensor, second: tf.Tensor) -> tf.Tensor:
        word, _ = _threefry(tf.bitcast(seed, tf.uint32), first, second)
        return tf.cast(tf.cast(tf.bitwise.right_shift(word, _constant(8)), tf.int32), tf.float32) * 2.0**-24

    return tf.function(draw, autograph=False)


@functools.cache
def _folded() -> Callable:
    """Returns the function from a seed and a number to the seed under it."""

    def fold(seed: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
        # Elements count from 0 in the second word, too: the last value sets the seeds apart from them.
        return tf.bitcast(tf.stack(_threefry(tf.bitcast(seed, tf.uint32), number, _constant(_WORD - 1))), tf.int32)

    return tf.function(fold, autograph=False)


def _counters(shape: tuple[int, ...], rows: Rows | None = None) -> tuple[tf.Tensor, tf.Tensor]:
    """Two words that no two elements share.

    The index within the trailing dimensions, as many as one word can count, and the index of those before.
    """
    words, stride = [_constant(0), _constant(0)], [1, 1]
    which = 0
    for dimension in reversed(range(len(shape))):
        size, index = shape[dimension], tf.range(shape[dimension])
        if rows is not None and dimension == 0:
            size, index = rows.total, index + rows.first
        if size == 1:  # its index is 0, and the stride may be one more than a word holds
            continue
        if stride[0] * size > _WORD:
            which = 1
        index = tf.cast(index, tf.uint32) * _constant(stride[which])
        words[which] += tf.reshape(index, [-1] + [1] * (len(shape) - 1 - dimension))
        stride[which] *= size
    return tf.broadcast_to(words[0], shape), words[1]


def _threefry(key: tf.Tensor, first: tf.Tensor, second: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Hashes each pair of words under the key `[2] uint32`."""
    schedule = (key[0], key[1], tf.bitwise.bitwise_xor(tf.bitwise.bitwise_xor(key[0], key[1]), _constant(_PARITY)))
    first, second = first + schedule[0], second + schedule[1]
    for number in range(_ROUNDS):
        first += second
        second = tf.bitwise.bitwise_xor(_rotate(second, _ROTATIONS[number % 8]), first)
        if number % 4 == 3:
            block = number // 4 + 1
            first += schedule[block % 3]
            second += schedule[(block + 1) % 3] + _constant(block)
    return first, second


def _rotate(word: tf.Tensor, bits: int) -> tf.Tensor:
    return tf.bitwise.bitwise_or(
        tf.bitwise.left_shift(word, _constant(bits)), tf.bitwise.right_shift(word, _constant(32 - bits))
    )


def _constant(value: int) -> tf.Tensor:
    return tf.constant(value, tf.uint32)
