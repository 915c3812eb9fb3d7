"""The U-Net: the weights of its paper, a loss of rows with a volume alone, and training on any number of devices."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from lingvo_moe import tree
from lingvo_moe.engines import pjrt
from lingvo_moe.errors import UserError
from lingvo_moe.layers.base import Context, initial_value
from lingvo_moe.lazy import tf
from lingvo_moe.models.segmentation import UNet
from lingvo_moe.optimizers.adafactor import Adafactor
from lingvo_moe.sharding.layout import DeviceMesh, Layout, Spec
from lingvo_moe.steps import Steps
from lingvo_moe.testing import harness

pytestmark = pytest.mark.slow

MODEL = UNet(num_layers=2, base_channels=2)
BATCH, SIZE, STEPS = 2, (16, 8, 8), 3
# Relative. Sums over the 2048 voxels of a batch in another order, through normalisations and three
# steps of Adafactor, which divides gradients by their size.
TOLERANCE = 4096 * harness.FLOAT32_ROUNDING


@functools.cache
def batch() -> dict:
    """Voxels that depend on their labels."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 3, (BATCH, *SIZE)).astype(np.int32)
    voxels = labels[..., None] + random.normal(size=(BATCH, *SIZE, 1))
    return {
        "source": {"voxels": voxels.astype(np.float32)},
        "target": {"labels": labels, "segment_ids": np.ones(BATCH, np.int32)},
    }


def theta(model: UNet = MODEL) -> dict:
    flat = tree.flatten(model.weights())
    return tree.unflatten({path: initial_value(weight, path, tf.constant([0, 1])) for path, weight in flat.items()})


def test_weights_are_those_of_the_paper():
    """Cicek et al. 2016, section 2: 19,069,955; 2,336 are the scales of the normalisation, which they do not count."""
    assert UNet(channels=3, classes=3).num_weights() == 19_069_955 + 2_336


def classified_by_figure_2(weights: dict, voxels: tf.Tensor) -> tf.Tensor:
    """Logits of a U-Net of two levels, in the operators of TensorFlow and the order of Cicek et al., figure 2."""

    def convolved(inputs: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
        return tf.nn.conv3d(inputs, kernel, strides=(1, 1, 1, 1, 1), padding="SAME")

    def block(name: str, outputs: tf.Tensor) -> tf.Tensor:
        for layer in ("first", "second"):
            outputs, norm = convolved(outputs, weights[name][layer]["kernel"]), weights[name][f"{layer}_norm"]
            moments = tf.nn.moments(outputs, axes=(1, 2, 3), keepdims=True)
            outputs = tf.nn.relu(tf.nn.batch_normalization(outputs, *moments, norm["bias"], norm["scale"], 1e-5))
        return outputs

    fine = block("analysis_0", voxels)
    coarse = block("analysis_1", tf.nn.max_pool3d(fine, 2, 2, "VALID"))
    kernel, shape = weights["upsampling_0"]["kernel"], (*fine.shape[:-1], coarse.shape[-1])
    wide = tf.nn.conv3d_transpose(coarse, kernel, shape, strides=(1, 2, 2, 2, 1), padding="SAME")
    outputs = block("synthesis_0", tf.concat([fine, wide], axis=-1))
    return convolved(outputs, weights["softmax"]["kernel"]) + weights["softmax"]["bias"]


def test_layers_are_those_of_figure_2():
    """Two levels, with weights that are all unlike their initial values: classes of all voxels, and the loss."""
    random = np.random.default_rng(1)
    weights = tree.map_leaves(
        lambda weight: tf.constant(weight.mean + (weight.stddev or 0.3) * random.normal(size=weight.shape), tf.float32),
        MODEL.weights(),
    )
    given = tree.map_leaves(tf.constant, batch())
    logits = classified_by_figure_2(weights, given["source"]["voxels"])
    classes = MODEL.segment(weights, given["source"], Context()).numpy()
    assert len(np.unique(classes)) == MODEL.classes
    np.testing.assert_array_equal(classes, np.argmax(logits, axis=-1))
    expected = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(given["target"]["labels"], logits))
    _, metrics = MODEL.loss(weights, given, Context())
    np.testing.assert_allclose(metrics["cross_entropy"], expected, rtol=TOLERANCE)


def test_positions_are_counted_level_by_level():
    """The products of each layer of figure 2 of Cicek et al., here of a volume of 64^3: voxels, taps, channels."""
    layers = [
        (1, 27, 1, 32),
        (1, 27, 32, 64),
        (8, 27, 64, 64),
        (8, 27, 64, 128),
        (64, 27, 128, 128),
        (64, 27, 128, 256),
    ]
    layers += [(512, 27, 256, 256), (512, 27, 256, 512), (512, 8, 512, 512), (64, 27, 768, 256), (64, 27, 256, 256)]
    layers += [(64, 8, 256, 256), (8, 27, 384, 128), (8, 27, 128, 128), (8, 8, 128, 128), (1, 27, 192, 64)]
    layers += [(1, 27, 64, 64), (1, 1, 64, 3)]
    expected = sum(64**3 / smaller * taps * inputs * outputs for smaller, taps, inputs, outputs in layers)
    model, lengths = UNet(), {"source": 64**3, "target": 64**3}
    kernels = {path: weight for path, weight in tree.flatten(model.weights()).items() if weight.fan_in}
    found = sum(model.positions_of(path, lengths) * weight.size for path, weight in kernels.items())
    assert found == expected and len(kernels) == len(layers)


def loss_of(given: dict) -> dict[str, float]:
    """Loss and metrics of a model whose logits are 0, 1 and 2 everywhere."""
    weights = theta()
    weights["softmax"] = {"kernel": tf.zeros((1, 1, 1, 4, 3)), "bias": tf.constant([0.0, 1.0, 2.0])}
    loss, metrics = MODEL.loss(weights, tree.map_leaves(tf.constant, given), Context())
    return {"loss": float(loss), **{name: float(value) for name, value in metrics.items()}}


def test_loss_is_cross_entropy_and_dice_of_rows_with_a_volume():
    """Against NumPy in float64; an empty row changes nothing."""
    given = tree.map_leaves(np.copy, batch())
    given["target"]["segment_ids"][1] = 0
    labels = given["target"]["labels"][0]
    probabilities = np.exp([0.0, 1.0, 2.0]) / np.exp([0.0, 1.0, 2.0]).sum()
    counts = np.bincount(labels.ravel(), minlength=3)
    cross_entropy = -(counts * np.log(probabilities)).sum() / labels.size
    dice = (2 * counts * probabilities + 1) / (counts + labels.size * probabilities + 1)
    expected = {"cross_entropy": cross_entropy, "dice": dice[1:].mean(), "tokens": labels.size}
    expected["loss"] = cross_entropy + 1 - expected["dice"]
    assert loss_of(given) == pytest.approx(expected, rel=2048 * harness.FLOAT32_ROUNDING)


def layout(devices: int) -> Layout:
    return Layout.of(DeviceMesh((devices,)), "spatial")


@functools.cache
def training(devices: int) -> tuple[pjrt.Executable, dict]:
    """The compiled training step, and a new state."""
    steps = Steps(MODEL, Adafactor(), layout(devices))
    shape = (BATCH, *SIZE)
    specs = {
        "source": {"voxels": Spec((*shape, 1), "float32", "BXYZi")},
        "target": {"labels": Spec(shape, "int32", "BXYZ"), "segment_ids": Spec((BATCH,), "int32", "B")},
    }
    engine = harness.engine(layout(devices))
    state = engine.compile(steps.init())({"seed": np.int32([0, 1])})["state"]
    return engine.compile(steps.train(specs)), state


@functools.cache
def losses(devices: int) -> list[float]:
    step, state = training(devices)
    found = []
    for _ in range(STEPS):
        outputs = step({"state": state, "batch": batch()})
        state = outputs["state"]
        found.append(float(outputs["metrics"]["loss"]))
    return found


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_devices_that_share_volumes_train_as_one_device(devices):
    """Losses of three steps; on eight devices the deepest level has one slice for each."""
    np.testing.assert_allclose(losses(devices), losses(1), rtol=TOLERANCE)
    assert losses(1)[-1] < losses(1)[0]


def test_only_halos_and_sums_cross_devices():
    """The voxels and labels are annotated, and nothing else is needed: no AllGather, no AllToAll."""
    step, _ = training(8)
    assert set(harness.collectives(step)) == {"collective-permute", "all-reduce"}


@pytest.mark.parametrize(
    "size, devices, pattern",
    [
        (
            (16, 8, 6),
            1,
            "input.size is 16x8x6; 3 levels .model.num_layers. halve each side 2 times, so use multiples of 4",
        ),
        (
            (16, 16, 8),
            1,
            "input.size is 16x16x8; a side of the last of 3 levels has 2, fewer than the 3 voxels of a.*at least 12",
        ),
        ((16, 16, 16), 8, "8 devices share 4 elements along X"),
    ],
)
def test_volumes_that_are_too_small(size, devices, pattern):
    model, voxels = UNet(num_layers=3, base_channels=1), tf.zeros((1, *size, 1))
    with pytest.raises(UserError, match=pattern):
        model.segment(theta(model), {"voxels": voxels}, Context(layout(devices)))


@pytest.mark.parametrize(
    "fields", [{"num_layers": 1}, {"classes": 1}, {"base_channels": 0}, {"activation_dtype": "int8"}]
)
def test_settings_that_make_no_model(fields):
    with pytest.raises(UserError, match=next(iter(fields))):
        UNet(**fields)
