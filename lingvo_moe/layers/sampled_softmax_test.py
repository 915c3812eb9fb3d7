"""Sampled softmax estimates the cross-entropy of the whole vocabulary, sharded or not."""

from __future__ import annotations

import dataclasses
import itertools
import re

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

from lingvo_moe.layers.base import Context
from lingvo_moe.layers.sampled_softmax import interval_boundaries, sampled_cross_entropy
from lingvo_moe.lazy import tf
from lingvo_moe.sharding.layout import DeviceMesh, Layout
from lingvo_moe.testing import harness

VOCABULARY, MODEL = 16, 8
# Sums of products over M = 8, and of exponentials over V = 16.
TOLERANCE = 32 * harness.FLOAT32_ROUNDING
WEIGHTS = ("table", "projection")


@dataclasses.dataclass(frozen=True)
class Drawing(Context):
    """A context that draws the numbers it is given."""

    numbers: tuple[float, ...] = ()

    def uniform(self, shape: tuple[int, ...], key: str) -> tf.Tensor:
        """Returns them."""
        assert shape == (len(self.numbers),)
        return tf.constant(self.numbers, tf.float32)


def example(name: str) -> tuple[dict, np.ndarray, np.ndarray, np.ndarray]:
    """Returns (theta, inputs `[2, 8, M]`, labels `[2, 8]`, the cross-entropies by numpy); each id is a label once."""
    random = np.random.default_rng(0)
    table, inputs = random.normal(size=(VOCABULARY, MODEL)), random.normal(size=(2, 8, MODEL))
    labels = random.permutation(VOCABULARY).reshape(2, 8)
    logits = inputs @ table.T
    expected = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, labels[..., None], -1)[..., 0]
    weights = table if name == "table" else table.T
    return {name: tf.constant(weights, tf.float32)}, inputs.astype(np.float32), labels.astype(np.int32), expected


@pytest.mark.parametrize("name", WEIGHTS)
def test_all_ids_as_candidates_are_the_whole_softmax(name):
    theta, inputs, labels, expected = example(name)
    context = Context(seed=tf.constant([0, 1]))
    found = sampled_cross_entropy(theta, tf.constant(inputs), tf.constant(labels), VOCABULARY, context)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * 16)


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("candidates", [4, 5, 6])
def test_the_mean_over_all_draws_is_unbiased(name, candidates):
    """exp(cross-entropy) - 1 is the sum over the other ids of the exponentials of their logits, over the label's."""
    theta, inputs, labels, expected = example(name)
    # The middle of each id's share of [0, 1), for each interval; then all combinations of one id of each.
    shares = [(np.arange(width) + 0.5) / width for width in np.diff(interval_boundaries(candidates, VOCABULARY))]
    contexts = [Drawing(seed=tf.constant([0, 1]), numbers=numbers) for numbers in itertools.product(*shares)]
    found = [
        np.exp(sampled_cross_entropy(theta, tf.constant(inputs), tf.constant(labels), candidates, context)) - 1
        for context in contexts
    ]
    np.testing.assert_allclose(np.mean(found, axis=0), np.exp(expected) - 1, rtol=TOLERANCE * 16)


@hypothesis.given(strategies.integers(2, 50_000), strategies.floats(0.0, 1.0))
def test_intervals_cover_the_vocabulary_and_grow(vocabulary, share):
    number = max(2, round(share * vocabulary))
    boundaries = interval_boundaries(number, vocabulary)
    widths = np.diff(boundaries)
    assert (len(widths), boundaries[0], boundaries[-1]) == (number, 0, vocabulary)
    # Rounding to whole ids changes a length by at most one.
    assert widths.min() >= 1 and (np.maximum.accumulate(widths) - widths).max() <= 1


def test_each_id_is_drawn():
    """Over many seeds; an id that is drawn has a gradient."""
    theta, seen = {"table": tf.zeros((VOCABULARY, MODEL))}, np.zeros(VOCABULARY, bool)
    inputs, labels = tf.ones((1, 1, MODEL)), tf.zeros((1, 1), tf.int32)
    for seed in range(64):
        with tf.GradientTape() as tape:
            tape.watch(theta["table"])
            nll = sampled_cross_entropy(theta, inputs, labels, 6, Context(seed=tf.constant([0, seed])))
        seen |= tf.convert_to_tensor(tape.gradient(nll, theta["table"])).numpy().any(axis=1)
    assert seen.all()


def test_candidates_are_drawn_once():
    """No loop over all logits, in value or gradient, computes random numbers: XLA fuses what draws them if it can."""
    inputs = {
        "table": np.zeros((VOCABULARY, MODEL), np.float32),
        "inputs": np.zeros((4, 3, MODEL), np.float32),
        "labels": np.zeros((4, 3), np.int32),
        "seed": np.int32([3, 5]),
    }

    def function(inputs: dict) -> dict:
        context = Context(seed=inputs["seed"], platform="cpu")
        theta = {"table": inputs["table"]}
        return {"nll": sampled_cross_entropy(theta, inputs["inputs"], inputs["labels"], 6, context)}

    module = harness.compile_for(harness.with_gradients(function), inputs).hlo()
    over_logits = [text for text in module.split("\n\n") if re.search(r"f32\[(4,3|12),6\]", text)]
    drawing = [text for text in module.split("\n\n") if " xor(" in text]
    assert over_logits and drawing
    assert not [text for text in over_logits if text in drawing and not text.startswith("ENTRY")]


@pytest.mark.parametrize("mesh", ["2", "8", "4x2"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_partitioned_equals_unpartitioned(name, mesh):
    """Value and gradients, on 2-D meshes with the vocabulary sharded along y."""
    random = np.random.default_rng(1)
    shapes = {"table": (VOCABULARY, MODEL), "projection": (MODEL, VOCABULARY)}
    inputs = {
        name: random.normal(size=shapes[name]).astype(np.float32),
        "inputs": random.normal(size=(8, 3, MODEL)).astype(np.float32),
        "labels": random.integers(0, VOCABULARY, (8, 3)).astype(np.int32),
        "seed": np.int32([3, 5]),
    }

    def call(layout: Layout):
        def function(inputs: dict) -> dict:
            context = Context(layout, seed=inputs["seed"])
            return {"nll": sampled_cross_entropy({name: inputs[name]}, inputs["inputs"], inputs["labels"], 6, context)}

        return harness.with_gradients(function)

    layout = Layout.of(DeviceMesh.parse(mesh))
    axes = {"table": "VM", "projection": "MV"}[name]
    logical_axes = {name: axes, "inputs": "BTM", "labels": "BT", "values/nll": "BT", f"gradients/{name}": axes}
    one, many = harness.run(call(Layout()), inputs), harness.run(call(layout), inputs, layout, logical_axes)
    for path, expected in one.items():
        np.testing.assert_allclose(many[path], expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())
