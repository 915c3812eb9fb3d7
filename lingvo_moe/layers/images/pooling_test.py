"""Pooling equals NumPy over windows, and partitioned pooling that of one device, with halos alone between devices."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lingvo_moe.engines.topology import Slice
from lingvo_moe.layers.base import Context, Layer
from lingvo_moe.layers.images.convolution import Convolution
from lingvo_moe.layers.images.pooling import AveragePooling, MaxPooling
from lingvo_moe.lazy import tf
from lingvo_moe.testing import harness, spatial

pytestmark = pytest.mark.slow

REDUCTIONS = {MaxPooling: np.max, AveragePooling: np.mean}


@pytest.mark.parametrize("kind, low, high", [("SAME", 1, 1), ("VALID", 0, 0), (((2, 2),) * 3, 2, 2)])
@pytest.mark.parametrize("cls", REDUCTIONS)
def test_equals_numpy_over_windows(cls, kind, low, high):
    """Windows of 3 with stride 2 over volumes of 7^3; padding does not take part."""
    layer = cls(window=(3, 3, 3), strides=(2, 2, 2), padding=kind)
    images = -1.0 - np.random.default_rng(0).random((2, 7, 7, 7, 2)).astype(np.float32)  # below the padding of zeros
    starts = range(-low, 7 + high - 2, 2)
    expected = np.zeros((2, *(len(starts),) * 3, 2))
    for position, corner in zip(np.ndindex(*(len(starts),) * 3), itertools.product(starts, repeat=3)):
        window = tuple(slice(max(start, 0), start + 3) for start in corner)
        expected[(slice(None), *position)] = REDUCTIONS[cls](images[(slice(None), *window)], axis=(1, 2, 3))
    found = layer({}, tf.constant(images), Context())
    np.testing.assert_allclose(found, expected, rtol=27 * harness.FLOAT32_ROUNDING)


@st.composite
def pooling(draw, cls: type[MaxPooling] | type[AveragePooling], devices: int) -> tuple:
    """A layer and images or volumes that devices share unevenly, or evenly; windows overlap along every dimension."""
    rank, size = draw(st.integers(2, 3)), draw(st.integers(devices, 5 * devices))
    strides = (draw(st.integers(1, 4)), 1, 2)[:rank]
    most = 9 if cls is AveragePooling else max(2 * strides[0] - 1, 1)
    window = (draw(st.integers(1, most)), 2, 3)[:rank]
    explicit = tuple(tuple(draw(st.integers(0, min(2, part - 1))) for _ in range(2)) for part in window)
    padding = draw(st.sampled_from(["SAME", "VALID", explicit]))
    return cls(window=window, strides=strides, padding=padding), (1, *(size, 3, 4)[:rank], 2)


@settings(max_examples=5)
@given(data=st.data(), devices=st.sampled_from([2, 4, 8]))
def test_partitioned_equals_one_device(data, devices):
    """Output and gradient: strides, paddings, windows of several partitions, uneven and empty last partitions."""
    is_accepted = lambda drawn: spatial.accepts(*drawn, devices)  # noqa: E731
    kinds = {"max": MaxPooling, "average": AveragePooling}
    layers = {name: data.draw(pooling(cls, devices).filter(is_accepted)) for name, cls in kinds.items()}
    spatial.assert_partitioned(layers, devices)


@pytest.mark.parametrize(
    "layer, kinds",
    [
        (MaxPooling(window=(2, 2, 2), strides=(2, 2, 2)), set()),
        (MaxPooling(window=(3, 1, 1), strides=(2, 1, 1)), {"collective-permute"}),
        (AveragePooling(window=(3, 1, 1), strides=(2, 1, 1)), {"collective-permute"}),
    ],
)
def test_devices_exchange_halos_alone(layer, kinds):
    """On eight devices; where windows do not overlap and devices divide them, nothing is exchanged."""
    assert set(harness.collectives(spatial.compiled(layer, (1, 32, 2, 2, 2), devices=8))) == kinds


def test_gradients_of_wide_windows_are_wrong():
    """Why MaxPooling refuses windows of two strides: partitioned, the gradient of TensorFlow's operator is wrong.

    If this fails, XLA has been corrected, and `MaxPooling._check_overlap` may go.
    """
    inputs = {"images": np.random.default_rng(0).normal(size=(1, 24, 1, 1)).astype(np.float32)}
    pool = harness.with_gradients(lambda t: {"y": tf.nn.max_pool2d(t["images"], (2, 1), 1, "SAME")})
    paths = dict.fromkeys(("images", "gradients/images", "values/y"), "bXyi")
    expected = harness.run(pool, inputs)
    found = harness.run(pool, inputs, spatial.layout(4), paths)
    np.testing.assert_array_equal(found["values/y"], expected["values/y"])
    difference = found["gradients/images"] - expected["gradients/images"]
    assert np.abs(difference).max() > 0.1 * np.abs(expected["gradients/images"]).max()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Downwards(Layer):
    """What a U-Net does on its way down: a convolution, ReLU, max-pooling, and a convolution with stride 2."""

    first = Convolution(inputs=4, outputs=8, window=(3, 3, 3))
    pool = MaxPooling(window=(2, 2, 2), strides=(2, 2, 2))
    second = Convolution(inputs=8, outputs=8, window=(3, 3, 3), strides=(2, 2, 2))

    def weights(self) -> dict:
        return {"first": self.first.weights(), "second": self.second.weights()}

    def __call__(self, theta: dict, inputs: tf.Tensor, context: Context) -> tf.Tensor:
        pooled = self.pool({}, tf.nn.relu(self.first(theta["first"], inputs, context)), context)
        return self.second(theta["second"], pooled, context)


def test_tpu_cores_exchange_halos_alone():
    """Compiled for 8 TPU v3 cores: five halos, one AllReduce of all weights' gradients, and no AllGather.

    The first convolution's output and kernel gradient share two, its gradient by the image needs two, and the second
    convolution one. The gradient of the second one's output is a constant here, of which every core has all.
    """
    program = spatial.lowered(Downwards(), (1, 64, 8, 8, 4), devices=8)
    found = harness.collectives(Slice.of("v3:2x2x1").compile(program))
    assert found == {"collective-permute": 5, "all-reduce": 1}
