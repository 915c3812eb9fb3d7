"""Instance normalisation is its formula, in float32 whatever the activations are, on any number of devices."""

from __future__ import annotations

import numpy as np

from lingvo_moe.layers.base import Context
from lingvo_moe.layers.images.normalization import InstanceNorm
from lingvo_moe.lazy import tf
from lingvo_moe.testing import harness, spatial

LAYER = InstanceNorm(channels=3)


def test_equals_numpy():
    """Each channel of each volume by itself."""
    inputs = spatial.example(LAYER, (2, 4, 3, 2, 3))
    wide = inputs["images"].astype(np.float64)
    mean, variance = wide.mean((1, 2, 3), keepdims=True), wide.var((1, 2, 3), keepdims=True)
    expected = (wide - mean) / np.sqrt(variance + 1e-5) * inputs["theta"]["scale"] + inputs["theta"]["bias"]
    found = LAYER(inputs["theta"], tf.constant(inputs["images"]), Context())
    np.testing.assert_allclose(found, expected, rtol=0, atol=spatial.TOLERANCE)


def test_partitioned_equals_one_device():
    """Sums over an image cross the devices that share it, unevenly."""
    spatial.assert_partitioned({"norm": (LAYER, (2, 9, 2, 3))}, devices=4)


def test_only_sums_cross_devices():
    found = harness.collectives(spatial.compiled(LAYER, (2, 8, 2, 3), devices=8))
    assert set(found) == {"all-reduce"}
