"""The relative position bias is T5's: the same buckets, a number for each head, whatever positions are asked for."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lingvo_moe.layers.base import Context
from lingvo_moe.layers.relative_bias import RelativeBias
from lingvo_moe.lazy import tf

HEADS = 3


def bucket_of(offset: int, buckets: int, distance: int, bidirectional: bool) -> int:
    """T5's code for one pair of positions, in its float32: `offset` is the key's position minus the query's."""
    first = 0
    if bidirectional:
        buckets //= 2
        first = buckets if offset > 0 else 0
        far = abs(offset)
    else:
        far = max(-offset, 0)
    exact = buckets // 2
    if far < exact:
        return first + far
    share = np.log(np.float32(far) / np.float32(exact)) / np.float32(math.log(distance / exact))
    return first + min(exact + int(share * np.float32(buckets - exact)), buckets - 1)


def layer_of(buckets: int, distance: int, bidirectional: bool) -> RelativeBias:
    return RelativeBias(model_dim=16, num_heads=HEADS, buckets=buckets, distance=distance, bidirectional=bidirectional)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("buckets, distance", [(32, 128), (32, 17), (8, 6), (6, 100), (4, 3)])
def test_the_bias_is_that_of_the_bucket_of_each_distance(buckets, distance, bidirectional):
    """Up to beyond the largest distance, and of positions that are in no order."""
    layer = layer_of(buckets, distance, bidirectional)
    (weight,) = layer.weights().values()
    table = np.random.default_rng(0).normal(size=weight.shape).astype(np.float32)
    queries, keys = [0, 150, 7], [*range(160), 3, 3]
    theta = {"relative_bias": tf.constant(table)}
    found = layer(theta, tf.constant(queries), tf.constant(keys), Context()).numpy()
    assert found.shape == (HEADS, len(queries), len(keys))
    for n, query, key in np.ndindex(found.shape):
        offset = keys[key] - queries[query]
        if bidirectional or offset <= 0:
            assert found[n, query, key] == table[bucket_of(offset, buckets, distance, bidirectional), n], offset


def test_all_buckets_are_used():
    """By distances below the largest one; but for one of an encoder's, as no key after the query has the distance 0."""
    for bidirectional, expected in ((True, set(range(32)) - {16}), (False, set(range(32)))):
        buckets = layer_of(32, 128, bidirectional)
        table = tf.tile(tf.range(32, dtype=tf.float32)[:, None], (1, HEADS))
        bias = buckets({"relative_bias": table}, tf.constant([127]), tf.range(255), Context())
        assert set(bias.numpy()[0, 0].astype(int)) == expected
