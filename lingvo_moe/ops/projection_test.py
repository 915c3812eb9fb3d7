"""The products of activations and weights that are made for a CPU equal the plain einsums, in value and gradient."""

from __future__ import annotations

import re

import numpy as np
import pytest

from lingvo_moe import tree
from lingvo_moe.engines.cluster import Cluster, target_of
from lingvo_moe.layers.mixture_of_experts import MixtureOfExperts
from lingvo_moe.lazy import tf
from lingvo_moe.ops.context import Context
from lingvo_moe.ops.projection import (
    FEW_ROWS,
    LARGE,
    prepare_weight,
    project,
    project_by_expert,
    project_in_float32,
)
from lingvo_moe.program import lower
from lingvo_moe.sharding.layout import DeviceMesh, Layout, Spec
from lingvo_moe.testing import harness
from lingvo_moe.utils import processor


@pytest.mark.parametrize(
    "inputs, weight, contracted", [((2, 3, 4), (4, 5), 1), ((2, 3, 4), (4, 2, 3), 1), ((2, 3, 2, 4), (2, 4, 5), 2)]
)
def test_project_for_a_cpu_equals_the_einsum(inputs, weight, contracted):
    """In value and gradient, with one or two contracted dimensions and with heads as outputs."""
    check_platforms(
        lambda given, context: project(given["inputs"], given["weight"], context, contracted), inputs, weight
    )


@pytest.mark.parametrize(
    "inputs, weight, contracted", [((2, 3, 4), (4, 5), 1), ((8, 3), (3, 2, 8), 1), ((1, 7, 2, 4), (2, 4, 9), 2)]
)
def test_a_prepared_weight_gives_the_same_products(inputs, weight, contracted, monkeypatch):
    """Transposed once, of the second of two layers, with a bias."""
    monkeypatch.setattr("lingvo_moe.ops.projection.LARGE", 1)
    random, context = np.random.default_rng(0), Context(platform="cpu")
    rows, weights, bias = (
        tf.constant(random.normal(size=shape), tf.float32) for shape in (inputs, (2, *weight), weight[contracted:])
    )
    prepared = prepare_weight(weights, context, contracted)
    assert prepared["transposed"].shape == (2, *weight[contracted:], *weight[:contracted])
    found = project(rows, {"transposed": prepared["transposed"][1]}, context, contracted, bias)
    np.testing.assert_allclose(found, project(rows, weights[1], context, contracted, bias), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "size, context",
    [
        ((LARGE, LARGE - 1), Context(platform="cpu")),
        ((LARGE, LARGE), Context(platform="gpu")),
        ((LARGE, LARGE), Context(platform="cpu", dtype="bfloat16")),
        ((LARGE, LARGE), Context(platform="cpu", matmul_precision="bfloat16")),
        ((LARGE, LARGE), Context(platform="cpu", layout=Layout.of(DeviceMesh((2,))))),
    ],
)
def test_only_large_weights_on_one_cpu_are_prepared(size, context, monkeypatch):
    """Not small ones, nor on several devices, on a GPU, in bfloat16, or where operands are rounded."""
    monkeypatch.setattr(processor, "multiplies_bfloat16", lambda: True)
    weights = tf.zeros((1, *size))
    assert prepare_weight(weights, context) is weights
    assert isinstance(prepare_weight(tf.zeros((1, LARGE, LARGE)), Context(platform="cpu")), dict)


@pytest.mark.parametrize(
    "groups, capacity, fan_in, outputs",
    [
        (2, 4, 5, 6),
        (2, 16, 24, 40),
        (1, 7, 16, 9),
        (1, 1, 8, 8),
        (3, 16, 8, 24),
        (1, FEW_ROWS, 8, 8),
        (1, FEW_ROWS + 1, 8, 8),
    ],
)
def test_project_by_expert_for_a_cpu_equals_the_einsum(groups, capacity, fan_in, outputs):
    """In value and gradient, for few rows and many, with sides that tiles divide and sides that they do not."""
    check_platforms(
        lambda given, context: project_by_expert(given["inputs"], given["weight"], context),
        (3, groups, capacity, fan_in),
        (3, fan_in, outputs),
    )


def test_project_in_float32_equals_the_einsum_in_value_and_gradient():
    """Compiled, for a platform in particular and for none, against the einsum in float64."""
    random = np.random.default_rng(0)
    given = {"inputs": random.normal(size=(2, 3, 8)), "weight": random.normal(size=(8, 5))}
    exact = harness.with_gradients(
        lambda given: {"outputs": tf.einsum("GSK,KO->GSO", given["inputs"], given["weight"])}
    )
    expected = harness.arrays(exact(tree.map_leaves(tf.constant, given)))
    narrow = {name: value.astype(np.float32) for name, value in given.items()}
    for platform in ("", "tpu", "cpu"):

        def product(given, platform=platform):
            return {"outputs": project_in_float32(given["inputs"], given["weight"], Context(platform=platform))}

        found = harness.compile_for(harness.with_gradients(product), narrow)(narrow)
        for path, value in tree.flatten(expected).items():
            np.testing.assert_allclose(tree.flatten(found)[path], value, rtol=0, atol=1e-5, err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v3:2x2x1", "v6e:2x4", "h100:1x8"])
def test_the_routers_logits_are_multiplied_in_float32(topology):
    """Read from the module that the compiler makes: the products of a router, forward and backward, and no others.

    Their names have the scope `gating`, by which plans find the part of the model.
    """
    target = target_of(topology)
    platform = "gpu" if isinstance(target, Cluster) else "tpu"
    layer = MixtureOfExperts(model_dim=128, hidden_dim=256, num_experts=8, num_groups=8)
    layout = Layout.of(DeviceMesh((8,)))
    weights = {name: Spec(weight.shape, "float32", weight.logical_axes) for name, weight in layer.weights().items()}

    def function(inputs):
        with tf.GradientTape() as tape:
            tape.watch([inputs["x"], *inputs["theta"].values()])
            paddings = tf.zeros(inputs["x"].shape[:2], tf.bool)
            outputs, metrics = layer(inputs["theta"], inputs["x"], paddings, Context(layout, platform=platform))
            loss = tf.reduce_sum(outputs**2) + metrics["aux_loss"]
        return {"gradients": tape.gradient(loss, {"x": inputs["x"], **inputs["theta"]})}

    axes = {"gradients/x": "BTM", **{f"gradients/{name}": spec.logical_axes for name, spec in weights.items()}}
    specs = {"x": Spec((8, 128, 128), "float32", "BTM"), "theta": weights}
    text = target.compile(lower("routed", function, specs, axes, layout)).hlo()
    products = [line for line in text.splitlines() if re.search(r" (convolution|dot)\(", line)]
    exact = [line for line in products if "operand_precision={highest,highest}" in line]
    assert len(exact) == 3 and all("gating/XlaDot" in line for line in exact) and len(products) > len(exact)


def check_platforms(product, inputs: tuple[int, ...], weight: tuple[int, ...]):
    random = np.random.default_rng(0)
    given = {"inputs": tf.constant(random.normal(size=inputs)), "weight": tf.constant(random.normal(size=weight))}
    plain, of_cpu = (
        harness.arrays(
            harness.with_gradients(
                lambda given, context=Context(platform=platform, dtype="float64"): {"outputs": product(given, context)}
            )(given)
        )
        for platform in ("", "cpu")
    )
    for path, value in plain.items():
        np.testing.assert_allclose(of_cpu[path], value, rtol=0, atol=1e-13, err_msg=path)
