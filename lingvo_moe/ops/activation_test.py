"""ReLU equals TensorFlow's, in value and gradient, and lets XLA keep the result alone."""

from __future__ import annotations

import numpy as np
import pytest

from lingvo_moe.engines.cluster import Cluster
from lingvo_moe.lazy import tf
from lingvo_moe.ops.activation import relu
from lingvo_moe.ops.context import Context
from lingvo_moe.testing import harness


def for_gpu(inputs: tf.Tensor) -> tf.Tensor:
    return relu(inputs, "BT"[: inputs.shape.rank], Context(platform="gpu"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equals_tensorflows(dtype):
    """In value and gradient; at 0, and at -0, the gradient is 0."""
    random = np.random.default_rng(0).normal(size=50)
    inputs = {"x": tf.cast(tf.constant([*random, 0.0, -0.0, 1e-30, -1e-30, np.inf, -np.inf]), dtype)}
    found, expected = (
        harness.arrays(harness.with_gradients(lambda given, function=function: {"y": function(given["x"])})(inputs))
        for function in (for_gpu, tf.nn.relu)
    )
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path], value, err_msg=path)


def test_the_product_before_it_writes_its_result_alone():
    """On a GPU. With TensorFlow's gradient XLA keeps the product, and applies the ReLU in a pass of its own."""
    inputs = {"x": np.ones((1024, 512), np.float32), "w": np.ones((512, 2048), np.float32)}

    def module(function) -> str:
        def product(given: dict) -> dict:
            factors = (tf.cast(given[name], tf.bfloat16) for name in ("x", "w"))
            return {"y": tf.cast(function(tf.matmul(*factors)), tf.float32)}

        options = ["xla_gpu_enable_triton_gemm=false"]
        program = harness.lower_for(harness.with_gradients(product), inputs)
        return Cluster.of("h100:1x1", options).compile(program).hlo()

    assert '"epilogue":"RELU"' in module(for_gpu)
    assert '"epilogue":"RELU"' not in module(tf.nn.relu)
