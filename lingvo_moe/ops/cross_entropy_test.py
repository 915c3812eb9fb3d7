"""Cross-entropy with a written-out gradient equals TensorFlow's own, in value and gradient."""

from __future__ import annotations

import numpy as np

from lingvo_moe.lazy import tf
from lingvo_moe.ops.cross_entropy import label_and_mean_nll
from lingvo_moe.testing import harness

# An exponential, a logarithm and sums over V = 7.
TOLERANCE = 16 * harness.FLOAT32_ROUNDING


def test_equals_tensorflows():
    """Both results, and gradients through both at once."""
    random = np.random.default_rng(0)
    inputs = {"logits": tf.constant(3 * random.normal(size=(2, 3, 7)), tf.float32)}
    labels = tf.constant(random.integers(7, size=(2, 3)), tf.int32)

    def own(inputs: dict) -> dict:
        return dict(zip(("nll", "mean"), label_and_mean_nll(inputs["logits"], labels)))

    def plain(inputs: dict) -> dict:
        log_likelihoods = tf.nn.log_softmax(inputs["logits"])
        nll = -tf.gather(log_likelihoods, labels, batch_dims=2)
        return {"nll": nll, "mean": -tf.reduce_mean(log_likelihoods, axis=-1)}

    found, expected = (harness.arrays(harness.with_gradients(function)(inputs)) for function in (own, plain))
    for path, value in expected.items():
        atol = TOLERANCE * np.abs(value).max()
        np.testing.assert_allclose(found[path], value, rtol=0, atol=atol, err_msg=path)


def test_the_gradient_has_the_name_scope_of_its_caller():
    """By it, plans count the pass over the logits as a part of the softmax."""

    @tf.function(autograph=False)
    def gradient(logits: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(logits)
            with tf.name_scope("softmax"):
                nll, _ = label_and_mean_nll(logits, tf.zeros((2, 3), tf.int32))
        return tape.gradient(nll, logits)

    operators = gradient.get_concrete_function(tf.TensorSpec((2, 3, 7))).graph.get_operations()
    exponentials = [each.name for each in operators if each.type == "Exp" and each.name.startswith("gradient_tape/")]
    assert exponentials and all(name.startswith("gradient_tape/softmax/") for name in exponentials)
