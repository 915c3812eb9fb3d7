"""Windows that cannot be, and images that are too small, are errors that say what to change."""

from __future__ import annotations

import pytest

from lingvo_moe.errors import UserError
from lingvo_moe.layers.base import Context
from lingvo_moe.layers.images.convolution import Convolution, TransposedConvolution
from lingvo_moe.layers.images.pooling import AveragePooling, MaxPooling
from lingvo_moe.lazy import tf
from lingvo_moe.testing import spatial

KERNEL = {"inputs": 2, "outputs": 2, "window": (3, 3)}


@pytest.mark.parametrize(
    "make, pattern",
    [
        (lambda: MaxPooling(window=(2,)), r"window is \(2,\); give a size for 2 dimensions, or for 3"),
        (lambda: MaxPooling(window=(2, 0)), r"MaxPooling: window is \(2, 0\); give 2 numbers from 1"),
        (lambda: MaxPooling(window=(2, 2), strides=(2,)), r"strides is \(2,\); give 2 numbers"),
        (lambda: MaxPooling(window=(2, 2), padding="FULL"), "padding is 'FULL'; use SAME, VALID or 2 pairs"),
        (lambda: MaxPooling(window=(2, 2), padding=((0, 0), (0, -1))), "numbers from 0"),
        (lambda: AveragePooling(window=(2, 2), padding=((0, 0), (0, 2))), "AveragePooling: .* of padding alone has no"),
        (lambda: MaxPooling(window=(2, 2), padding=((2, 2), (0, 0))), "MaxPooling: .* of padding alone has no value"),
        (lambda: Convolution(**KERNEL, dilations=(1, 1, 1)), r"dilations is \(1, 1, 1\); give 2 numbers"),
        (lambda: Convolution(**KERNEL, groups=3), "3 groups do not divide 2 inputs and 2 outputs"),
        (lambda: Convolution(**KERNEL | {"outputs": 0}), "outputs is 0; it counts channels"),
        (
            lambda: Convolution(inputs=1, outputs=1, window=(2, 2, 2), dilations=(1, 1, 2), padding="VALID"),
            "swaps those of Y and Z",
        ),
    ],
)
def test_settings_that_make_no_layer(make, pattern):
    with pytest.raises(UserError, match=pattern):
        make()


@pytest.mark.parametrize(
    "layer, shape, devices, pattern",
    [
        (Convolution(**KERNEL), (1, 8, 8, 8, 2), 1, r"has shape \(1, 8, 8, 8, 2\); expected \[batch, 2 spatial"),
        (TransposedConvolution(**KERNEL), (1, 8, 2), 1, "expected .batch, 2 spatial dimensions, channels"),
        (Convolution(**KERNEL), (1, 8, 2, 2), 1, "a window spans 3 elements along Y, but the image has 2. Use larger"),
        (Convolution(**KERNEL, dilations=(4, 1)), (1, 8, 8, 2), 1, "spans 9 elements along X, but the image has 8"),
        (
            MaxPooling(window=(4, 2), padding=((1, 0), (0, 0))),
            (1, 2, 8, 2),
            1,
            r"4 elements along X, but the image has 2 and 1 \+ 0 of padding",
        ),
        (
            TransposedConvolution(**KERNEL, padding=((2, 2), (0, 0))),
            (1, 2, 8, 2),
            1,
            r"cuts 2 \+ 2 of the 4 elements along X off",
        ),
        (
            TransposedConvolution(**KERNEL | {"window": (9, 3)}, strides=(2, 1)),
            (1, 4, 8, 2),
            4,
            r"windows of 9 with stride 2 along X, of which a device has one \(mesh 4\), overlap .* than its neigh",
        ),
        (
            TransposedConvolution(**KERNEL | {"window": (4, 3)}, strides=(2, 1), padding="VALID"),
            (1, 4, 8, 2),
            4,
            "windows of 4 with stride 2 along X",
        ),
        (
            Convolution(**KERNEL | {"window": (7, 3)}, strides=(2, 1), padding="VALID"),
            (1, 14, 8, 2),
            4,
            "Convolution: windows of 7 with stride 2 along X",
        ),
        (
            Convolution(**KERNEL),
            (1, 6, 8, 2),
            8,
            r"8 devices share 6 elements along X \(mesh 8\); .* 2 of them .* empty",
        ),
        (MaxPooling(window=(2, 2), strides=(2, 2)), (1, 8, 8, 2), 8, "8 devices share 4 elements along X"),
        (MaxPooling(window=(3, 2), strides=(1, 2)), (1, 8, 8, 2), 2, "wrong gradients .* Use windows below 2"),
    ],
)
def test_images_that_do_not_fit(layer, shape, devices, pattern):
    theta = {name: tf.zeros(weight.shape) for name, weight in layer.weights().items()}
    with pytest.raises(UserError, match=pattern):
        layer(theta, tf.zeros(shape), Context(spatial.layout(devices)))
