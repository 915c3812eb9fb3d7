"""Attention equals its formula; masks hide other sentences, paddings and later tokens."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from lingvo_moe import tree
from lingvo_moe.layers.attention import MultiHeadAttention, causal_mask, segment_mask
from lingvo_moe.layers.base import Context
from lingvo_moe.lazy import tf
from lingvo_moe.sharding.layout import DeviceMesh, Layout
from lingvo_moe.testing import harness

MODEL, HEADS, HEAD = 8, 4, 3
LAYER = MultiHeadAttention(model_dim=MODEL, num_heads=HEADS, head_dim=HEAD, biases=True)
PLAIN = dataclasses.replace(LAYER, biases=False)
# Relative to the largest element: products over M = 8, D = 3, N * D = 12 and a softmax over a few positions.
TOLERANCE = 16 * harness.FLOAT32_ROUNDING


def theta_of(seed: int = 0) -> dict:
    random = np.random.default_rng(seed)
    return {name: random.normal(size=weight.shape).astype(np.float32) for name, weight in LAYER.weights().items()}


def tokens_of(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(*shape, MODEL)).astype(np.float32)


def by_numpy(
    theta: dict, queries: np.ndarray, memory: np.ndarray, mask: np.ndarray, biases: np.ndarray | None = None
) -> np.ndarray:
    """softmax(q k^T / sqrt(D) + bias) v, for each sentence, query and head (Vaswani et al. 2017, equation 1)."""

    def project(name: str, n: int, inputs: np.ndarray) -> np.ndarray:
        return inputs.astype(np.float64) @ theta[name][:, n] + theta.get(f"{name}_bias", np.zeros((HEADS, HEAD)))[n]

    outputs = np.zeros(queries.shape) + theta.get("output_bias", 0.0)
    for b, t in np.ndindex(queries.shape[:2]):
        for n in range(HEADS):
            visible = memory[b][mask[b, t]]
            scores = project("key", n, visible) @ project("query", n, queries[b, t]) / np.sqrt(HEAD)
            scores += 0 if biases is None else biases[n, t, mask[b, t]]
            shares = np.exp(scores - scores.max())
            outputs[b, t] += shares / shares.sum() @ project("value", n, visible) @ theta["output"][n]
    return outputs


def attend(
    theta: dict, queries: np.ndarray, memory: np.ndarray, mask: np.ndarray, layer: MultiHeadAttention = LAYER
) -> np.ndarray:
    tensors = tree.map_leaves(tf.constant, theta)
    return layer(tensors, tf.constant(queries), tf.constant(memory), tf.constant(mask), Context()).numpy()


def assert_close(actual: np.ndarray, expected: np.ndarray):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


@pytest.mark.parametrize("columns", [3, 1])
def test_a_bias_is_added_to_the_divided_logits(columns):
    """Of each head, query and key, or of all queries; hidden keys stay hidden."""
    random, theta = np.random.default_rng(2), theta_of()
    queries, memory = tokens_of(2, 3), tokens_of(2, 5)
    mask, bias = random.random((2, 3, 5)) < 0.6, random.normal(size=(HEADS, columns, 5)).astype(np.float32)
    mask[..., 0] = True
    tensors = (tf.constant(given) for given in (queries, memory, mask))
    found = LAYER(tree.map_leaves(tf.constant, theta), *tensors, Context(), tf.constant(10 * bias)).numpy()
    biases = np.broadcast_to(10 * bias, (HEADS, 3, 5))
    assert_close(found, by_numpy(theta, queries, memory, mask, biases))


@pytest.mark.parametrize("layer", [LAYER, PLAIN], ids=["biases", "plain"])
def test_equals_numpy(layer):
    queries, memory = tokens_of(2, 3), tokens_of(2, 5)
    theta = {name: theta_of()[name] for name in layer.weights()}
    mask = np.random.default_rng(2).random((2, 3, 5)) < 0.6
    mask[..., 0] = True
    assert_close(attend(theta, queries, memory, mask, layer), by_numpy(theta, queries, memory, mask))


def test_a_query_that_sees_nothing_gets_the_mean_of_all_values():
    memory, theta = tokens_of(1, 4), theta_of()
    found = attend(theta, tokens_of(1, 1), memory, np.zeros((1, 1, 4), bool))[0, 0]
    mean = np.einsum("lm,mnd->lnd", memory[0], theta["value"]).mean(axis=0) + theta["value_bias"]
    assert_close(found, np.einsum("nd,ndm->m", mean, theta["output"]) + theta["output_bias"])


def test_segment_mask_is_same_segment_and_no_padding():
    mask = segment_mask(tf.constant([[1, 2, 0]]), tf.constant([[1, 1, 2, 0]])).numpy()
    np.testing.assert_array_equal(mask[0], [[True, True, False, False], [False, False, True, False], [False] * 4])


def test_causal_mask_hides_later_tokens():
    mask = causal_mask(tf.constant([[1, 1, 2, 2, 0]])).numpy()[0].astype(int)
    np.testing.assert_array_equal(
        mask, [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 0]]
    )


@pytest.mark.parametrize("masked", [lambda s: segment_mask(s, s), causal_mask], ids=["encoder", "decoder"])
def test_packed_sentences_equal_separate_ones(masked):
    tokens = tokens_of(1, 7)
    packed = attend(theta_of(), tokens, tokens, masked(tf.constant([[1, 1, 1, 2, 2, 2, 2]])).numpy())
    for part in (np.s_[:, :3], np.s_[:, 3:]):
        alone = tokens[part]
        assert_close(packed[part], attend(theta_of(), alone, alone, masked(tf.ones(alone.shape[:2], tf.int32)).numpy()))


def test_paddings_do_not_change_the_outputs():
    tokens, segments = tokens_of(1, 5), tf.constant([[1, 1, 1, 0, 0]])
    changed = np.concatenate([tokens[:, :3], 100 * tokens[:, 3:]], axis=1)
    mask = segment_mask(segments, segments).numpy()
    np.testing.assert_array_equal(
        attend(theta_of(), tokens, tokens, mask)[:, :3], attend(theta_of(), changed, changed, mask)[:, :3]
    )


def test_a_token_does_not_see_later_ones():
    tokens, mask = tokens_of(1, 5), causal_mask(tf.ones((1, 5), tf.int32)).numpy()
    changed = np.concatenate([tokens[:, :3], -tokens[:, 3:]], axis=1)
    before, after = (attend(theta_of(), t, t, mask) for t in (tokens, changed))
    np.testing.assert_array_equal(before[:, :3], after[:, :3])
    assert (before[:, 3:] != after[:, 3:]).all()


def test_attend_over_given_keys_and_values_is_the_same():
    queries, memory, theta = tokens_of(2, 3), tokens_of(2, 5), tree.map_leaves(tf.constant, theta_of())
    mask = tf.ones((2, 3, 5), tf.bool)
    keys, values = LAYER.keys_values(theta, tf.constant(memory), Context())
    np.testing.assert_array_equal(
        LAYER.attend(theta, tf.constant(queries), keys, values, mask, Context()),
        LAYER(theta, tf.constant(queries), tf.constant(memory), mask, Context()),
    )


def test_dropout_drops_attention_probabilities_in_training_only():
    layer = dataclasses.replace(LAYER, dropout=0.5)
    theta, tokens = tree.map_leaves(tf.constant, theta_of()), tf.constant(tokens_of(2, 5))
    mask = tf.ones((2, 5, 5), tf.bool)
    without = layer(theta, tokens, tokens, mask, Context()).numpy()
    np.testing.assert_array_equal(without, LAYER(theta, tokens, tokens, mask, Context()))
    training = Context(seed=tf.constant([1, 2]))
    assert (layer(theta, tokens, tokens, mask, training).numpy() != without).all()


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "platform"), [("8", ""), ("4x2", ""), ("4x2", "gpu")])
def test_partitioned_equals_unpartitioned(mesh, platform):
    """Value and gradients; on two axes the heads lie along y. The gradient for GPUs is another one."""
    inputs = {"theta": theta_of(), "tokens": tokens_of(8, 4), "segments": np.tile(np.int32([1, 1, 2, 0]), (8, 1))}

    def call(layout: Layout):
        def function(inputs: dict) -> dict:
            tokens, mask = inputs["tokens"], causal_mask(inputs["segments"])
            return {"y": LAYER(inputs["theta"], tokens, tokens, mask, Context(layout, platform=platform))}

        return harness.with_gradients(function)

    layout = Layout.of(DeviceMesh.parse(mesh))
    logical_axes = {f"theta/{name}": weight.logical_axes for name, weight in LAYER.weights().items()} | {
        "tokens": "BTM"
    }
    logical_axes |= {f"gradients/{path}": name for path, name in logical_axes.items()} | {
        "segments": "BT",
        "values/y": "BTM",
    }
    one, many = harness.run(call(Layout()), inputs), harness.run(call(layout), inputs, layout, logical_axes)
    for path, expected in one.items():
        assert_close(many[path], expected)
