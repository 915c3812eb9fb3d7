"""Convolutions equal sums over windows, and partitioned ones those of one device, with halos alone between devices."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lingvo_moe import tree
from lingvo_moe.errors import UserError
from lingvo_moe.layers.base import Context
from lingvo_moe.layers.images.convolution import Convolution, TransposedConvolution
from lingvo_moe.lazy import tf
from lingvo_moe.testing import harness, spatial

pytestmark = pytest.mark.slow


def padding_of(layer: Convolution, sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    """TensorFlow's definition of the padding of each dimension."""
    if not isinstance(layer.padding, str):
        return list(layer.padding)
    if layer.padding == "VALID":
        return [(0, 0)] * len(sizes)
    extents = [(window - 1) * dilation + 1 for window, dilation in zip(layer.window, layer.dilations)]
    totals = [max((-(-n // s) - 1) * s + extent - n, 0) for n, s, extent in zip(sizes, layer.strides, extents)]
    return [(total // 2, total - total // 2) for total in totals]


def by_windows(layer: Convolution, images: np.ndarray, theta: dict) -> np.ndarray:
    """The convolution in float64, one window after another."""
    padding = padding_of(layer, images.shape[1:-1])
    padded = np.pad(images.astype(np.float64), [(0, 0), *padding, (0, 0)])
    of_group, outputs = layer.inputs // layer.groups, layer.outputs // layer.groups
    extents = [(window - 1) * dilation + 1 for window, dilation in zip(layer.window, layer.dilations)]
    sizes = [(n - extent) // s + 1 for n, extent, s in zip(padded.shape[1:], extents, layer.strides)]
    found = np.zeros((len(images), *sizes, layer.outputs))
    for position in itertools.product(*map(range, sizes)):
        for tap in itertools.product(*map(range, layer.window)):
            read = tuple(p * s + t * d for p, s, t, d in zip(position, layer.strides, tap, layer.dilations))
            for group in range(layer.groups):
                channels = padded[(slice(None), *read, slice(group * of_group, (group + 1) * of_group))]
                columns = slice(group * outputs, (group + 1) * outputs)
                found[(slice(None), *position, columns)] += channels @ theta["kernel"][tap][:, columns]
    return found + theta.get("bias", 0.0)


@st.composite
def convolutions(draw, rank: int) -> Convolution:
    """2-D or 3-D; window, stride, dilation, padding and groups of any kind."""
    sizes = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(rank))  # noqa: E731
    explicit = tuple((draw(st.integers(0, 3)), draw(st.integers(0, 3))) for _ in range(rank))
    groups, multiple = draw(st.sampled_from([(1, 1), (1, 3), (2, 2), (4, 1), (4, 2)]))
    return Convolution(
        inputs=4,
        outputs=4 * multiple,
        groups=groups,
        window=sizes(1, 4),
        strides=sizes(1, 3),
        dilations=(draw(st.integers(1, 2)), *(draw(st.integers(1, 2)),) * (rank - 1)),
        padding=draw(st.sampled_from(["SAME", "VALID", explicit])),
        bias=draw(st.booleans()),
    )


@settings(max_examples=8)
@given(data=st.data(), rank=st.integers(2, 3))
def test_equals_a_sum_over_windows(data, rank):
    """On one device, against float64."""
    layer, shape = data.draw(convolutions(rank)), (2, *(7, 5, 6)[:rank], 4)
    assume(all(extent <= size for extent, size in zip(layer.extent, shape[1:])))
    inputs = spatial.example(layer, shape)
    run = lambda tensors: {"y": layer(tensors["theta"], tensors["images"], Context())}  # noqa: E731
    expected = by_windows(layer, inputs["images"], inputs["theta"])
    atol = spatial.TOLERANCE * np.abs(expected).max()
    np.testing.assert_allclose(harness.run(run, inputs)["y"], expected, rtol=0, atol=atol)


def by_scattering(layer: TransposedConvolution, images: np.ndarray, theta: dict) -> np.ndarray:
    """The transposed convolution in float64: each input adds its multiple of the kernel to a window of the output."""
    sizes = images.shape[1:-1]
    extents = [(window - 1) * dilation + 1 for window, dilation in zip(layer.window, layer.dilations)]
    reached = [(n - 1) * s + extent for n, s, extent in zip(sizes, layer.strides, extents)]
    total = np.zeros(
        (len(images), *(max(n * s, all_) for n, s, all_ in zip(sizes, layer.strides, reached)), layer.outputs)
    )
    for position in itertools.product(*map(range, sizes)):
        for tap in itertools.product(*map(range, layer.window)):
            written = tuple(p * s + t * d for p, s, t, d in zip(position, layer.strides, tap, layer.dilations))
            total[(slice(None), *written)] += (
                images[(slice(None), *position)] @ theta["kernel"][tap].astype(np.float64).T
            )
    if layer.padding == "SAME":  # that of the convolution that this one transposes, from `n * s` elements to n
        low = [max(all_ - n * s, 0) // 2 for n, s, all_ in zip(sizes, layer.strides, reached)]
        kept = [slice(start, start + n * s) for start, n, s in zip(low, sizes, layer.strides)]
    else:
        padding = [(0, 0)] * len(sizes) if layer.padding == "VALID" else layer.padding
        kept = [slice(low, all_ - high) for (low, high), all_ in zip(padding, reached)]
    return total[(slice(None), *kept)] + theta.get("bias", 0.0)


@st.composite
def transposed(draw, rank: int) -> TransposedConvolution:
    """2-D or 3-D; window, stride, dilation and padding of any kind that leaves an output."""
    sizes = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(rank))  # noqa: E731
    explicit = tuple((draw(st.integers(0, 2)), draw(st.integers(0, 1))) for _ in range(rank))
    return TransposedConvolution(
        inputs=2,
        outputs=3,
        window=sizes(1, 4),
        strides=sizes(1, 3),
        dilations=(draw(st.integers(1, 2)), *(draw(st.integers(1, 2)),) * (rank - 1)),
        padding=draw(st.sampled_from(["SAME", "VALID", explicit])),
        bias=draw(st.booleans()),
    )


@settings(max_examples=8)
@given(data=st.data(), rank=st.integers(2, 3))
def test_transposed_equals_scattered_kernels(data, rank):
    """On one device, against float64."""
    layer, shape = data.draw(transposed(rank)), (2, *(4, 5, 4)[:rank], 2)
    inputs = spatial.example(layer, shape)
    run = lambda tensors: {"y": layer(tensors["theta"], tensors["images"], Context())}  # noqa: E731
    expected = by_scattering(layer, inputs["images"].astype(np.float64), inputs["theta"])
    atol = spatial.TOLERANCE * np.abs(expected).max()
    np.testing.assert_allclose(harness.run(run, inputs)["y"], expected, rtol=0, atol=atol)


CHANNELS_AND_GROUPS = {"dense": (2, 1), "groups": (4, 2), "depthwise": (3, 3), "transposed": (2, 1)}


@st.composite
def partitioned(draw, kind: str, devices: spatial.Devices) -> tuple[Convolution | TransposedConvolution, tuple]:
    """A layer and images or volumes that devices share unevenly, or evenly; windows up to several partitions wide."""
    rank, is_transposed = draw(st.integers(2, 3)), kind == "transposed"
    along = ((devices, 1) if isinstance(devices, int) else devices) + (1,)
    each = lambda *bounds: tuple(draw(st.integers(*pair)) for pair in bounds[:rank])  # noqa: E731
    apart = draw(st.integers(1, 2))  # different dilations along Y and Z are an error unless padding is SAME
    dilations = (draw(st.integers(1, 3)), apart, apart)[:rank]
    window, strides = each((1, 9 // dilations[0]), (1, 3), (1, 2)), each((1, 4), (1, 3), (1, 2))
    extents = [(size - 1) * dilation + 1 for size, dilation in zip(window, dilations)]
    least = [n if is_transposed else (n - 1) * s + extent for n, s, extent in zip(along, strides, extents)]
    sizes = each(*((low, low + 3 * n) for low, n in zip(least, along)))
    explicit = tuple(zip(each((0, 4), (0, 2), (0, 1)), each((0, 4), (0, 1), (0, 1))))
    channels, groups = CHANNELS_AND_GROUPS[kind]
    fields = {
        "inputs": channels,
        "outputs": channels * draw(st.integers(1, 2)),
        "window": window,
        "strides": strides,
        "dilations": dilations,
        "padding": draw(st.sampled_from(["SAME", "VALID", explicit])),
        "bias": False,
    }
    layer = TransposedConvolution(**fields) if is_transposed else Convolution(**fields, groups=groups)
    return layer, (1, *sizes, channels)


@settings(max_examples=6)
@given(data=st.data(), devices=st.sampled_from([(2, 2), 4, 8, (4, 2)]))
def test_partitioned_equals_one_device(data, devices):
    """Output and both gradients: strides, dilations, paddings, wide windows, uneven and empty last partitions."""
    is_accepted = lambda drawn: spatial.accepts(*drawn, devices)  # noqa: E731
    layers = {kind: data.draw(partitioned(kind, devices).filter(is_accepted)) for kind in CHANNELS_AND_GROUPS}
    spatial.assert_partitioned(layers, devices)


# In program order: the halos of the image for the output, of the output's gradient, and of the image for the kernel's.
COLLECTIVES = {
    "volume": (Convolution(inputs=2, outputs=2, window=(3, 3, 3)), (1, 16, 3, 3, 2), 6),
    "stride": (Convolution(inputs=2, outputs=2, window=(3, 2), strides=(2, 2)), (1, 32, 2, 2), 3),
    "window of one and a half partitions": (Convolution(inputs=2, outputs=2, window=(7, 1)), (1, 16, 2, 2), 12),
    "window of five partitions": (Convolution(inputs=2, outputs=2, window=(11, 1)), (1, 16, 2, 2), 18),
    "dilation": (Convolution(inputs=2, outputs=2, window=(3, 1), dilations=(2, 1)), (1, 16, 2, 2), 6),
    "groups": (Convolution(inputs=4, outputs=4, groups=2, window=(3, 1)), (1, 16, 2, 4), 12),
    "depthwise": (Convolution(inputs=2, outputs=4, groups=2, window=(3, 1)), (1, 16, 2, 2), 6),
    "transposed, no overlap": (
        TransposedConvolution(inputs=2, outputs=2, window=(2, 2), strides=(2, 2)),
        (1, 16, 2, 2),
        0,
    ),
    "transposed": (TransposedConvolution(inputs=2, outputs=2, window=(3, 1), strides=(2, 1)), (1, 16, 2, 2), 3),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_devices_exchange_halos_and_add_up_weight_gradients(name):
    """On eight devices: CollectivePermutes of halos, one AllReduce (of kernel and bias together), no AllGather."""
    layer, shape, permutes = COLLECTIVES[name]
    found = harness.collectives(spatial.compiled(layer, shape, devices=8))
    assert found == {"all-reduce": 1} | ({"collective-permute": permutes} if permutes else {})


def test_halos_that_differ_between_partitions():
    """GShard appendix A.4, figure 11: 12 elements on 4 devices, window 3, padding (1, 1), stride 2: halos of 1 to 4.

    And, in the same program, windows that reach over five devices, and strided ones over three.
    """
    layer = Convolution(inputs=2, outputs=2, window=(3, 1), strides=(2, 1), padding=((1, 1), (0, 0)))
    wide = Convolution(inputs=2, outputs=2, window=(7, 1))
    strided = Convolution(inputs=2, outputs=2, window=(9, 1), strides=(2, 1))
    layers = {"figure_11": (layer, (1, 12, 2, 2)), "wide": (wide, (1, 8, 2, 2)), "strided": (strided, (1, 16, 2, 2))}
    spatial.assert_partitioned(layers, devices=4)


def test_padding_wider_than_the_window():
    """Its gradient, on one device and on four, is TensorFlow's own, computed without XLA.

    If conv2d padded, XLA's CPU compiler would read beyond the end of the output's gradient, on one device.
    """
    layer = Convolution(inputs=2, outputs=2, window=(3, 1), padding=((3, 1), (0, 0)), bias=False)
    inputs = tree.map_leaves(tf.constant, spatial.example(layer, (2, 16, 3, 2)))
    convolve = harness.with_gradients(
        lambda t: {"y": tf.nn.conv2d(t["images"], t["theta"]["kernel"], 1, [(0, 0), (3, 1), (0, 0), (0, 0)])}
    )
    expected = harness.arrays(convolve(inputs))["gradients/images"]
    for devices in (1, 4):
        found = spatial.run({"layer": (layer, (2, 16, 3, 2))}, devices)["gradients/layer/images"]
        np.testing.assert_allclose(found, expected, rtol=0, atol=spatial.TOLERANCE * np.abs(expected).max())


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneOperator(Convolution):
    """What the layer would be with one operator for all groups."""

    def __call__(self, theta: dict, inputs: tf.Tensor, context: Context) -> tf.Tensor:
        return tf.nn.conv2d(inputs, theta["kernel"], 1, "SAME")


def test_an_operator_with_groups_gathers_images():
    """Why the layer has an operator for each group. If this fails, XLA has been corrected, and one would do."""
    layer = OneOperator(inputs=4, outputs=4, groups=2, window=(3, 1), bias=False)
    assert harness.collectives(spatial.compiled(layer, (1, 8, 2, 4), devices=4))["all-gather"] > 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unchecked(TransposedConvolution):
    """What the layer would be if it took any parts of images."""

    def _check_parts(self, sizes: Sequence[int], context: Context):
        del sizes, context


def test_kernel_gradients_of_empty_partitions_are_wrong():
    """Why transposed convolutions refuse overlapping windows where devices have no part of the image.

    If this fails, XLA has been corrected, and `TransposedConvolution._check_parts` may go.
    """
    layers = {"y": (Unchecked(inputs=2, outputs=3, window=(5, 2), strides=(3, 1), bias=False), (1, 9, 4, 2))}
    kernel = "gradients/y/theta/kernel"
    expected, found = spatial.run(layers, devices=1)[kernel], spatial.run(layers, devices=8)[kernel]
    assert np.abs(found - expected).max() > 0.1 * np.abs(expected).max()


def test_windows_that_overlap_need_a_part_of_the_image_on_each_device():
    """An error where a device has none; without overlap, and on fewer devices, the layer works."""
    layer = TransposedConvolution(inputs=2, outputs=3, window=(5, 2), strides=(3, 1), bias=False)
    assert not spatial.accepts(layer, (1, 9, 4, 2), 8) and spatial.accepts(layer, (1, 9, 4, 2), 3)
    assert spatial.accepts(dataclasses.replace(layer, window=(3, 2)), (1, 9, 4, 2), 8)
    with pytest.raises(UserError, match="9 elements along X leave one of 8 devices without any"):
        spatial.compiled(layer, (1, 9, 4, 2), devices=8)
