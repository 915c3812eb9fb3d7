"""Relative attention equals its definition by distances, and does not depend on where a sequence begins."""

from __future__ import annotations

import numpy as np
import pytest

from lingvo_moe import tree
from lingvo_moe.errors import UserError
from lingvo_moe.layers.base import Context
from lingvo_moe.layers.relative_attention import RelativeAttention
from lingvo_moe.lazy import tf
from lingvo_moe.testing import harness

BATCH, LENGTH, MODEL, HEADS, HEAD = 2, 5, 8, 2, 6
LAYER = RelativeAttention(model_dim=MODEL, num_heads=HEADS, head_dim=HEAD)
# Relative to the largest element: products over M = 8, D = 6 and N * D = 12, and sines of float32 angles.
TOLERANCE = 64 * harness.FLOAT32_ROUNDING


def theta_of(seed: int = 0) -> dict:
    random = np.random.default_rng(seed)
    return {name: random.normal(size=weight.shape).astype(np.float32) for name, weight in LAYER.weights().items()}


def tokens_of(length: int = LENGTH) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(BATCH, length, MODEL)).astype(np.float32)


def attend(theta: dict, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    tensors, inputs = tree.map_leaves(tf.constant, theta), tf.constant(tokens)
    return LAYER(tensors, inputs, inputs, tf.constant(mask), Context()).numpy()


def by_distances(theta: dict, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Logits (q_i / sqrt(D) + u) k_j + (q_i / sqrt(D) + v) R(i - j), one pair of positions after another."""
    frequencies = 10000.0 ** (-np.arange(HEAD // 2) / (HEAD // 2 - 1))
    outputs = np.zeros(tokens.shape)
    for b, i, n in np.ndindex(BATCH, tokens.shape[1], HEADS):
        query = tokens[b, i].astype(np.float64) @ theta["query"][:, n] / np.sqrt(HEAD)
        logits = np.full(tokens.shape[1], -np.inf)
        for j in np.flatnonzero(mask[b, i]):
            waves = np.concatenate([np.sin((i - j) * frequencies), np.cos((i - j) * frequencies)])
            key = tokens[b, j] @ theta["key"][:, n]
            logits[j] = (query + theta["content_bias"][n]) @ key + (query + theta["position_bias"][n]) @ waves
        shares = np.exp(logits - logits.max())
        outputs[b, i] += shares / shares.sum() @ (tokens[b] @ theta["value"][:, n]) @ theta["output"][n]
    return outputs


def test_equals_logits_by_distance():
    mask = np.random.default_rng(2).random((BATCH, LENGTH, LENGTH)) < 0.7
    mask[:, :, 0] = True
    expected = by_distances(theta_of(), tokens_of(), mask)
    found = attend(theta_of(), tokens_of(), mask)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


def test_a_sequence_that_begins_later_has_the_same_outputs():
    """Three positions that nobody sees, in front of it, change nothing: only distances count."""
    tokens = tokens_of()
    shifted = np.concatenate([np.ones((BATCH, 3, MODEL), np.float32), tokens], axis=1)
    mask = np.zeros((BATCH, LENGTH + 3, LENGTH + 3), bool)
    mask[:, :, 3:] = True
    expected = attend(theta_of(), tokens, np.ones((BATCH, LENGTH, LENGTH), bool))
    found = attend(theta_of(), shifted, mask)[:, 3:]
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


def test_order_matters():
    tokens, mask = tokens_of(), np.ones((BATCH, LENGTH, LENGTH), bool)
    assert not np.allclose(attend(theta_of(), tokens, mask)[:, ::-1], attend(theta_of(), tokens[:, ::-1], mask))


def test_a_head_of_odd_size_is_an_error():
    with pytest.raises(UserError, match="head_dim is 5; .* must be even"):
        RelativeAttention(model_dim=MODEL, num_heads=HEADS, head_dim=5)
