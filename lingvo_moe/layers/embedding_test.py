"""Embeddings, positions and cross-entropy are their formulas, sharded or not."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lingvo_moe.layers.base import Context
from lingvo_moe.layers.embedding import WAVELENGTHS, Embedding, Softmax, cross_entropy, sinusoids
from lingvo_moe.lazy import tf
from lingvo_moe.sharding.layout import DeviceMesh, Layout
from lingvo_moe.testing import harness

VOCABULARY, MODEL = 16, 8
# A cross-entropy of a few nats: an exponential, a logarithm and sums over V = 16.
TOLERANCE = 32 * harness.FLOAT32_ROUNDING
# An angle of up to 10,000 radians is itself rounded to float32, and so is the frequency it is made from.
ANGLE_TOLERANCE = 4 * harness.FLOAT32_ROUNDING


def sinusoids_of(position: int, model_dim: int, of_paper: bool = False) -> list[float]:
    """Vaswani et al. 2017 section 3.5, with sines before cosines, one by one."""
    half = model_dim // 2
    wavelengths = [10000.0 ** (2 * i / model_dim if of_paper else i / (half - 1)) for i in range(half)]
    return [math.sin(position / w) for w in wavelengths] + [math.cos(position / w) for w in wavelengths]


@pytest.mark.parametrize("position", [0, 1, 17, 511, 9999])
def test_sinusoids_equal_the_formula(position):
    for wavelengths in WAVELENGTHS:
        found = sinusoids(tf.constant([[position]]), MODEL, wavelengths).numpy()[0, 0]
        expected = sinusoids_of(position, MODEL, wavelengths == "paper")
        np.testing.assert_allclose(found, expected, rtol=0, atol=ANGLE_TOLERANCE * max(position, 1))


@pytest.mark.parametrize("model_dim", [1, 2, 3, 7])
def test_sinusoids_of_odd_and_tiny_sizes_fill_up_with_zeros(model_dim):
    found = sinusoids(tf.constant([[0, 5]]), model_dim).numpy()
    assert found.shape == (1, 2, model_dim)
    assert not found[..., 2 * (model_dim // 2) :].any()


def test_embedding_looks_up_rows_and_adds_positions():
    layer = Embedding(vocabulary=VOCABULARY, model_dim=MODEL)
    table = np.random.default_rng(0).normal(size=(VOCABULARY, MODEL)).astype(np.float32)
    ids, positions = np.int32([[3, 3, 15]]), np.int32([[0, 1, 0]])
    found = layer({"table": tf.constant(table)}, tf.constant(ids), tf.constant(positions), Context()).numpy()
    expected = [table[i] * np.sqrt(MODEL) + sinusoids_of(p, MODEL) for i, p in zip(ids[0], positions[0])]
    np.testing.assert_allclose(found[0], expected, rtol=0, atol=TOLERANCE * 8)
    assert layer.weights()["table"].stddev == pytest.approx(1 / math.sqrt(MODEL))


@pytest.mark.parametrize("mesh", ["8", "4x2"])
def test_partitioned_equals_unpartitioned(mesh):
    """Lookup, projection and loss, with the vocabulary sharded along y on a 2-D mesh; value and gradients."""
    random = np.random.default_rng(1)
    inputs = {
        "table": random.normal(size=(VOCABULARY, MODEL)).astype(np.float32),
        "projection": random.normal(size=(MODEL, VOCABULARY)).astype(np.float32),
        "ids": random.integers(0, VOCABULARY, (8, 3)).astype(np.int32),
    }

    def call(layout: Layout):
        def function(inputs: dict) -> dict:
            context = Context(layout)
            embedded = Embedding(vocabulary=VOCABULARY, model_dim=MODEL)(inputs, inputs["ids"], inputs["ids"], context)
            logits = Softmax(vocabulary=VOCABULARY, model_dim=MODEL)(inputs, embedded, context)
            return {"nll": cross_entropy(logits, inputs["ids"], 0.1)[1]}

        return harness.with_gradients(function)

    layout = Layout.of(DeviceMesh.parse(mesh))
    logical_axes = {
        "table": "VM",
        "projection": "MV",
        "ids": "BT",
        "values/nll": "BT",
        "gradients/table": "VM",
        "gradients/projection": "MV",
    }
    one, many = harness.run(call(Layout()), inputs), harness.run(call(layout), inputs, layout, logical_axes)
    for path, expected in one.items():
        np.testing.assert_allclose(many[path], expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_cross_entropy_equals_numpy(smoothing):
    random = np.random.default_rng(2)
    logits, labels = random.normal(0, 4, (2, 5, VOCABULARY)), random.integers(0, VOCABULARY, (2, 5))
    log_shares = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    targets = (1 - smoothing) * np.eye(VOCABULARY)[labels] + smoothing / VOCABULARY
    reported, optimised = cross_entropy(tf.constant(logits, tf.float32), tf.constant(labels, tf.int32), smoothing)
    np.testing.assert_allclose(
        reported, -np.take_along_axis(log_shares, labels[..., None], -1)[..., 0], rtol=0, atol=TOLERANCE * 16
    )
    np.testing.assert_allclose(optimised, -(targets * log_shares).sum(-1), rtol=0, atol=TOLERANCE * 16)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropys_gradient_is_that_of_its_definition(smoothing):
    """It is written out by hand: p - (1 - s) [label] - s / V, times what comes from above, of both results at once."""
    random = np.random.default_rng(0)
    logits, labels, above = (
        random.normal(size=(2, 3, 7)) * 3,
        random.integers(7, size=(2, 3)),
        random.normal(size=(2, 2, 3)),
    )
    given = tf.constant(logits)
    with tf.GradientTape() as tape:
        tape.watch(given)
        total = sum(
            tf.reduce_sum(result * weight)
            for result, weight in zip(cross_entropy(given, tf.constant(labels, tf.int32), smoothing), above)
        )
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = sum(
        (shares - (1 - s) * np.eye(7)[labels] - s / 7) * weight[..., None] for s, weight in zip((0.0, smoothing), above)
    )
    np.testing.assert_allclose(tape.gradient(total, given), expected, rtol=0, atol=1e-12)


def test_cross_entropy_of_large_logits_is_finite():
    logits = tf.constant([[[1e4, 0.0, -1e4]]])
    for label, expected in enumerate((0.0, 1e4, 2e4)):
        assert float(cross_entropy(logits, tf.constant([[label]]))[0][0, 0]) == expected


def test_excluded_ids_have_no_probability_and_no_gradient():
    """The others have the probabilities of a softmax without them, whatever the weights of these are."""
    random, kept = np.random.default_rng(3), [i for i in range(VOCABULARY) if i not in (1, 4)]
    theta = {"projection": random.normal(size=(MODEL, VOCABULARY)).astype(np.float32)}
    theta["projection"][:, [1, 4]] *= 100
    inputs = tf.constant(random.normal(size=(2, 3, MODEL)), tf.float32)
    layer = Softmax(vocabulary=VOCABULARY, model_dim=MODEL, excluded=(4, 1))
    with tf.GradientTape() as tape:
        projection = tf.constant(theta["projection"])
        tape.watch(projection)
        probabilities = tf.nn.softmax(layer({"projection": projection}, inputs, Context()))
        some = probabilities[..., 0]
    logits = inputs.numpy() @ theta["projection"][:, kept]
    expected = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_allclose(probabilities.numpy()[..., kept], expected, rtol=1e-4)
    assert (probabilities.numpy()[..., [1, 4]] == 0).all()
    gradient = tape.gradient(some, projection).numpy()
    assert (gradient[:, [1, 4]] == 0).all() and gradient[:, kept].any(axis=0).all()


def test_logits_are_float32_whatever_the_activations_are():
    layer = Softmax(vocabulary=VOCABULARY, model_dim=MODEL)
    theta, inputs = {"projection": tf.ones((MODEL, VOCABULARY))}, tf.ones((1, 2, MODEL), tf.bfloat16)
    logits = layer(theta, inputs, Context(dtype="bfloat16"))
    assert logits.dtype == tf.float32 and (logits.numpy() == MODEL).all()
