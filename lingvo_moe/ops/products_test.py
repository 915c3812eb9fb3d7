"""Products for a CPU: values, gradients, their forms, when operands are rounded; XLA's compiler has all these forms."""

from __future__ import annotations

import dataclasses
import re

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lingvo_moe import tree
from lingvo_moe.engines.pjrt import Engine
from lingvo_moe.lazy import tf
from lingvo_moe.ops.context import Context
from lingvo_moe.ops.products import multiply, rounds_operands_of
from lingvo_moe.ops.projection import project, project_by_expert, project_in_float32, project_to_rows
from lingvo_moe.program import lower
from lingvo_moe.sharding.layout import DeviceMesh, Layout, Spec
from lingvo_moe.testing import harness
from lingvo_moe.utils import processor

_SIZES = st.sampled_from([1, 2, 3, 8, 33, 64])
_INFERENCE = {"platform": "cpu", "matmul_precision": "bfloat16"}
_TRAINING = {**_INFERENCE, "seed": np.zeros(2, np.int32)}


@pytest.fixture(autouse=True)
def fast_bfloat16(monkeypatch):
    """The results are the same on a processor that is not faster."""
    monkeypatch.setattr(processor, "multiplies_bfloat16", lambda: True)


@settings(max_examples=40)
@given(st.sampled_from([(), (1,), (3,)]), _SIZES, _SIZES, _SIZES, st.booleans(), st.booleans())
def test_products_of_any_shape_have_float32_sums(leading, height, inner, width, transpose_b, rounded):
    """Compiled, in value and both gradients, against NumPy in float64: no shape is one that XLA refuses to run."""
    random = np.random.default_rng(0)
    rows = random.normal(size=(*leading, height, inner)).astype(np.float32)
    weights = random.normal(size=(*leading, *((width, inner) if transpose_b else (inner, width)))).astype(np.float32)
    upstream = random.normal(size=(*leading, height, width)).astype(np.float32)
    context = Context(**{**_TRAINING, "matmul_precision": "bfloat16" if rounded else "default"})

    def function(tensors):
        with tf.GradientTape() as tape:
            tape.watch([tensors["rows"], tensors["weights"]])
            products = multiply(tensors["rows"], tensors["weights"], context, transpose_b)
        d_rows, d_weights = tape.gradient(products, [tensors["rows"], tensors["weights"]], tensors["upstream"])
        return {"products": products, "d_rows": d_rows, "d_weights": d_weights}

    tensors = {"rows": rows, "weights": weights, "upstream": upstream}
    found = harness.compile_for(function, tensors)(tensors)
    dtype = ml_dtypes.bfloat16 if rounded else np.float32
    r, w, u = (value.astype(dtype).astype(np.float64) for value in (rows, weights, upstream))
    matrix = np.swapaxes(w, -1, -2) if transpose_b else w
    d_weights = np.swapaxes(r, -1, -2) @ u
    expected = {
        "products": r @ matrix,
        "d_rows": u @ np.swapaxes(matrix, -1, -2),
        "d_weights": np.swapaxes(d_weights, -1, -2) if transpose_b else d_weights,
    }
    for name, value in expected.items():
        # The sum of up to 64 products of numbers below 5, each addition rounded to float32.
        tolerance = 64 * 64 * 25 * harness.FLOAT32_ROUNDING
        assert found[name].dtype == np.float32
        np.testing.assert_allclose(found[name], value, rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("form", ["matrix", "heads", "contracted heads", "experts", "few rows of experts", "table"])
def test_every_projection_is_rounded(form, training):
    """Each form differs from float32 by what rounding two operands may change, and by no less: it is in use."""
    multiply, inputs, weight = {
        "matrix": (project, (2, 20, 16), (16, 24)),
        "heads": (project, (2, 20, 16), (16, 2, 8)),
        "contracted heads": (lambda i, w, context: project(i, w, context, contracted=2), (2, 20, 2, 8), (2, 8, 24)),
        "experts": (project_by_expert, (3, 2, 20, 16), (3, 16, 24)),
        "few rows of experts": (project_by_expert, (3, 1, 4, 16), (3, 16, 24)),
        "table": (project_to_rows, (2, 20, 16), (24, 16)),
    }[form]
    random = np.random.default_rng(0)
    tensors = {"inputs": random.normal(size=inputs).astype(np.float32), "weight": random.normal(size=weight)}
    tensors["weight"] = tensors["weight"].astype(np.float32)

    def outputs(context):
        def products(t: dict) -> dict:
            return {"outputs": multiply(t["inputs"], t["weight"], context)}

        function = harness.with_gradients(products) if training else products
        return tree.flatten(harness.compile_for(function, tensors)(tensors))

    rounding = Context(**_TRAINING if training else _INFERENCE)
    exact, found = outputs(dataclasses.replace(rounding, matmul_precision="default")), outputs(rounding)
    for path, value in exact.items():
        difference = np.abs(found[path] - value).max()
        # Relative to the largest result: two operands of one rounding each.
        assert 0.01 * harness.BFLOAT16_ROUNDING < difference / np.abs(value).max() < 2 * harness.BFLOAT16_ROUNDING, path


def test_the_routers_product_is_not_rounded():
    """In value and gradient, the same bits as without the setting."""
    random = np.random.default_rng(0)
    tensors = {name: random.normal(size=size).astype(np.float32) for name, size in (("x", (2, 20, 16)), ("w", (16, 8)))}

    def outputs(context):
        products = harness.with_gradients(lambda t: {"outputs": project_in_float32(t["x"], t["w"], context)})
        return tree.flatten(harness.compile_for(products, tensors)(tensors))

    exact, found = outputs(Context(platform="cpu")), outputs(Context(**_TRAINING))
    for path, value in exact.items():
        np.testing.assert_array_equal(found[path], value, err_msg=path)


@pytest.mark.parametrize(
    "change", [{"platform": "tpu"}, {"matmul_precision": "default"}, {"matmul_precision": "highest"}]
)
def test_other_platforms_and_precisions_are_not_rounded(change):
    """Matrix units that round by themselves, and what the user did not ask for."""
    rows = tf.zeros((2, 2))
    assert rounds_operands_of(rows, Context(**_TRAINING))
    assert not rounds_operands_of(rows, Context(**{**_TRAINING, **change}))
    assert not rounds_operands_of(tf.cast(rows, tf.bfloat16), Context(**_TRAINING))


def test_a_processor_without_the_instructions_multiplies_float32(monkeypatch):
    """There, products of bfloat16 would be slower."""
    monkeypatch.setattr(processor, "multiplies_bfloat16", lambda: False)
    assert not rounds_operands_of(tf.zeros((2, 2)), Context(**_TRAINING))


def weight_gradient(sizes: tuple[int, int, int], transpose_b: bool = False, layout: Layout = Layout()) -> str:
    """The module of a weight's gradient, from [A, K] rows and [A, B] gradients of the products."""
    height, inner, width = sizes
    context = Context(**{**_TRAINING, "matmul_precision": "default", "layout": layout})

    def function(tensors):
        with tf.GradientTape() as tape:
            tape.watch(tensors["weights"])
            rows = context.annotate(tensors["rows"], "BM")
            products = context.annotate(multiply(rows, tensors["weights"], context, transpose_b), "BH")
        return {"gradient": tape.gradient(products, tensors["weights"], tensors["upstream"])}

    specs = {
        "rows": Spec((height, inner), "float32", "BM"),
        "weights": Spec((width, inner) if transpose_b else (inner, width), "float32", "HM" if transpose_b else "MH"),
        "upstream": Spec((height, width), "float32", "BH"),
    }
    axes = {"gradient": specs["weights"].logical_axes}
    return Engine(layout.mesh.size, "cpu").compile(lower("gradient", function, specs, axes, layout)).hlo()


@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("inner, width, slow", [(64, 128, False), (64, 64, False), (128, 64, True)])
def test_a_weights_gradient_has_the_library_s_kernel_where_that_gains(inner, width, slow, transpose_b):
    """No product of the module has a transposed first factor, unless the transposition costs what the kernel gains."""
    module = weight_gradient((256, inner, width), transpose_b)
    assert ("lhs_contracting_dims={0}" in module) == slow
    assert ("ynn" in module) != slow


@pytest.mark.parametrize("height", [256, 24, 20])
def test_a_transposition_is_sharded_as_its_tensor(height):
    """On two devices and four, the only collective is the sum of the devices' gradients, whatever the rows' number."""
    for mesh in (DeviceMesh((2,)), DeviceMesh((4,))):
        module = weight_gradient((height, 64, 128), layout=Layout.of(mesh))
        collectives = re.findall(r" (all-[a-z]+|collective-[a-z]+|reduce-scatter)(?:-start)?\(", module)
        assert collectives == ["all-reduce"], (height, mesh)
