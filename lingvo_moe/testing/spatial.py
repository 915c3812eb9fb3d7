"""Shared by the tests of images' layers: a layer and its gradients, on one device and spatially partitioned.

`devices` are a number, which share X, or a mesh of two axes, the first of which shares X and the second Y.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from lingvo_moe import tree
from lingvo_moe.engines import pjrt
from lingvo_moe.errors import UserError
from lingvo_moe.layers.base import Context
from lingvo_moe.lazy import tf
from lingvo_moe.program import Program
from lingvo_moe.sharding.layout import DeviceMesh, Layout
from lingvo_moe.testing import harness

Devices = int | tuple[int, int]

# Relative to the largest element: a sum over up to a few hundred products, in another order.
TOLERANCE = 256 * harness.FLOAT32_ROUNDING


class ImageLayer(Protocol):
    """A layer from images to images."""

    def weights(self) -> dict:
        """See `Layer.weights`."""
        ...

    def __call__(self, theta: dict, inputs: tf.Tensor, context: Context) -> tf.Tensor:
        """Returns images of the same rank."""
        ...


def layout(devices: Devices) -> Layout:
    """Returns the layout in which `devices` share the spatial dimension X, or a mesh X and Y."""
    if isinstance(devices, int):
        return Layout.of(DeviceMesh((devices,)), "spatial")
    return Layout.of(DeviceMesh(devices), "X:x,Y:y")


def example(layer: ImageLayer, shape: tuple[int, ...], seed: int = 0) -> dict:
    """Returns random `images` of a shape and random weights, `theta`."""
    random = np.random.default_rng(seed)
    normal = lambda shape: random.normal(size=shape).astype(np.float32)  # noqa: E731
    return {"images": normal(shape), "theta": tree.map_leaves(lambda weight: normal(weight.shape), layer.weights())}


def accepts(layer: ImageLayer, shape: tuple[int, ...], devices: Devices) -> bool:
    """Returns whether a layer raises no UserError for images that devices share; it is traced and computes nothing."""
    inputs, context = example(layer, shape), Context(layout(devices))
    call = tf.function(lambda images: layer(inputs.get("theta", {}), images, context), autograph=False)
    try:
        call.get_concrete_function(tf.TensorSpec(shape))
    except UserError:
        return False
    return True


def assert_partitioned(layers: Mapping[str, tuple[ImageLayer, tuple[int, ...]]], devices: Devices):
    """Outputs and all gradients of layers, by name with the shape of their images, equal those on one device."""
    expected, found = run(layers, devices=1), run(layers, devices)
    for path, value in expected.items():
        atol = TOLERANCE * max(np.abs(value).max(), 1e-9)
        message = f"{path} of {layers[path.split('/')[1]]} on {devices} devices"
        np.testing.assert_allclose(found[path], value, rtol=0, atol=atol, err_msg=message)


def run(layers: Mapping[str, tuple[ImageLayer, tuple[int, ...]]], devices: Devices) -> dict[str, np.ndarray]:
    """Returns outputs and all gradients of layers, by name with the shape of their images, in one program.

    The images and outputs of the program are replicated, and sharded inside of it, so that the devices need not divide
    them.
    """
    inputs = {name: example(layer, shape) for name, (layer, shape) in layers.items()}
    calls = _calls({name: layer for name, (layer, _) in layers.items()}, layout(devices))
    return harness.run(harness.with_gradients(calls), inputs, layout(devices))


def compiled(layer: ImageLayer, shape: tuple[int, ...], devices: Devices) -> pjrt.Executable:
    """Compiles what `lowered` lowers, for the first virtual CPU devices."""
    return harness.engine(layout(devices)).compile(lowered(layer, shape, devices))


def lowered(layer: ImageLayer, shape: tuple[int, ...], devices: Devices) -> Program:
    """Lowers a layer and its gradients for images that are sharded before and after the program.

    Nothing inside is annotated: the partitioner propagates the sharding.
    """
    inputs, rank = example(layer, shape), len(shape) - 2
    axes = f"b{'XYZ'[:rank]}i"
    paths = ("images", "values/outputs", "gradients/images")

    def function(tensors: dict) -> dict:
        return {"outputs": layer(tensors.get("theta", {}), tensors["images"], Context(layout(devices)))}

    return harness.lower_for(harness.with_gradients(function), inputs, layout(devices), dict.fromkeys(paths, axes))


def _calls(layers: Mapping[str, ImageLayer], layout: Layout) -> Callable[[dict], dict[str, tf.Tensor]]:
    def function(inputs: dict) -> dict[str, tf.Tensor]:
        context, outputs = Context(layout), {}
        for name, layer in layers.items():
            axes = f"b{'XYZ'[: inputs[name]['images'].shape.rank - 2]}i"
            images = context.annotate(inputs[name]["images"], axes)
            outputs[name] = context.annotate(layer(inputs[name].get("theta", {}), images, context), axes)
        return outputs

    return function
