"""Vectorised functions equal a loop, with the operators of our layers; others are errors that say what to do."""

from __future__ import annotations

import numpy as np
import pytest

from lingvo_moe.errors import UserError
from lingvo_moe.lazy import tf
from lingvo_moe.ops.context import Context
from lingvo_moe.ops.products import multiply
from lingvo_moe.ops.projection import project_in_float32
from lingvo_moe.ops.vectorize import vectorize
from lingvo_moe.testing import harness
from lingvo_moe.utils import processor

pytestmark = pytest.mark.slow


def inputs_of() -> dict:
    random = np.random.default_rng(0)
    return {
        "x": random.normal(size=(3, 2, 4, 5)).astype(np.float32),
        "weight": random.normal(size=(3, 5, 6)).astype(np.float32),
        "seed": np.int32([[1, 2], [3, 4], [5, 6]]),
    }


def both(one) -> dict:
    """The results of `one` vectorised, and of a loop."""

    def function(inputs: dict) -> dict:
        arguments = (inputs["x"], inputs["weight"], inputs["seed"])
        loop = [one(*(argument[i] for argument in arguments)) for i in range(3)]
        return {"vectorized": vectorize(one, arguments), "loop": tf.stack(loop)}

    return harness.run(function, inputs_of())


def test_exact_products_and_their_gradients():
    """The routers' products have an operator of XLA that TensorFlow cannot vectorise; one factor may be shared."""

    def one(x: tf.Tensor, weight: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch([x, weight])
            shared = project_in_float32(x, tf.constant(inputs_of()["weight"][0]), Context())
            products = tf.sin(project_in_float32(x, weight, Context())) + shared
        of_x, of_weight = tape.gradient(products, [x, weight])
        return tf.concat([tf.reshape(tensor, [-1]) for tensor in (products, of_x, of_weight)], axis=0)

    found = both(one)
    np.testing.assert_allclose(found["vectorized"], found["loop"], rtol=8 * harness.FLOAT32_ROUNDING, atol=1e-6)


@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("precision", ["bfloat16", "default"])
def test_products_for_a_cpu_and_their_gradients(precision, transpose_b, monkeypatch):
    """A pipeline's stages with either precision; one factor may be shared."""
    monkeypatch.setattr(processor, "multiplies_bfloat16", lambda: True)

    def one(x: tf.Tensor, weight: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        right = tf.transpose(weight) if transpose_b else weight
        context = Context(seed=seed, platform="cpu", matmul_precision=precision)
        with tf.GradientTape() as tape:
            tape.watch([x, right])
            pair = tf.stack([right, -right])
            shared = multiply(tf.constant(inputs_of()["x"][0]), pair, context, transpose_b)
            products = tf.sin(multiply(x, pair, context, transpose_b)) + shared
        of_x, of_right = tape.gradient(products, [x, right])
        return tf.concat([tf.reshape(tensor, [-1]) for tensor in (products, of_x, of_right)], axis=0)

    found = both(one)
    np.testing.assert_allclose(found["vectorized"], found["loop"], rtol=8 * harness.FLOAT32_ROUNDING, atol=1e-6)


def test_random_numbers():
    """Those of a stage depend on its own seed alone."""
    found = both(lambda x, weight, seed: Context(seed=seed).uniform((4, 3), "use"))
    np.testing.assert_array_equal(found["vectorized"], found["loop"])
    assert len(np.unique(found["loop"])) == 36


def test_operator_without_a_vectorised_form_is_an_error():
    """A loop over stages in its place would be a pipeline without parallel stages."""
    with pytest.raises(UserError, match="operator LinSpace.* model.pipeline=none"):
        both(lambda x, weight, seed: tf.raw_ops.LinSpace(start=x[0, 0, 0], stop=x[0, 0, 1], num=4))
