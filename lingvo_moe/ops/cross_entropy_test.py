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
