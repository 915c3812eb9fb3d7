"""CTC's loss is that of all alignments, one by one, and does not depend on padding."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lingvo_moe.layers.base import Context
from lingvo_moe.layers.ctc import BLANK, best_path, ctc_loss
from lingvo_moe.lazy import tf
from lingvo_moe.testing import harness

CLASSES = 3
# Of a loss of a few nats: sums of the exponentials of a few dozen float32 logits.
TOLERANCE = 64 * harness.FLOAT32_ROUNDING


def labels_of(path: tuple[int, ...]) -> list[int]:
    """What an alignment stands for: repetitions are one label, and blanks none (Graves et al. 2006, section 3.1)."""
    return [label for label, _ in itertools.groupby(path) if label != BLANK]


def by_alignments(logits: np.ndarray, labels: list[int]) -> float:
    """The negative logarithm of the sum of the probabilities of all alignments of one row."""
    shares = np.exp(logits.astype(np.float64))
    shares /= shares.sum(axis=-1, keepdims=True)
    alignments = itertools.product(range(CLASSES), repeat=len(logits))
    return -np.log(sum(np.prod(shares[range(len(path)), path]) for path in alignments if labels_of(path) == labels))


def by_states(logits: np.ndarray, labels: list[int]) -> float:
    """The same of one row of many frames, by the recursion of Graves et al., section 4.1, in float64."""
    wide = logits.astype(np.float64)
    logarithms = wide - np.logaddexp.reduce(wide, axis=-1, keepdims=True)
    states = [BLANK, *itertools.chain.from_iterable((label, BLANK) for label in labels)]
    paths = np.full(len(states), -np.inf)
    paths[:2] = logarithms[0, states[:2]]
    for frame in logarithms[1:]:
        before = np.concatenate([[-np.inf, -np.inf], paths])
        for u, state in enumerate(states):
            skipped = before[u] if u >= 2 and state not in (BLANK, states[u - 2]) else -np.inf
            paths[u] = np.logaddexp.reduce([before[u + 2], before[u + 1], skipped]) + frame[state]
    return float(-np.logaddexp(paths[-1], paths[-2]))


def losses(rows: list[tuple[np.ndarray, list[int]]], frames: int, length: int) -> np.ndarray:
    """The loss of each row, in a batch of rows padded to these sizes."""
    return losses_and_gradients(rows, frames, length)[0]


def losses_and_gradients(
    rows: list[tuple[np.ndarray, list[int]]], frames: int, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """The loss of each row, and the gradient of their sum by the logits `[rows, frames, V]`."""
    logits, silent = np.full((len(rows), frames, CLASSES), 5.0, np.float32), np.ones((len(rows), frames), bool)
    labels, absent = np.full((len(rows), length), 1, np.int32), np.ones((len(rows), length), bool)
    for row, (of_row, text) in enumerate(rows):
        logits[row, : len(of_row)], silent[row, : len(of_row)] = of_row, False
        labels[row, : len(text)], absent[row, : len(text)] = text, False
    nats, gradient = with_gradient(*map(tf.constant, (logits, silent, labels, absent)))
    return nats.numpy(), gradient.numpy()


@tf.function(autograph=False)  # traced once for the examples of one shape
def with_gradient(
    logits: tf.Tensor, silent: tf.Tensor, labels: tf.Tensor, absent: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """The loss of each row, and the gradient of their sum by the logits."""
    with tf.GradientTape() as tape:
        tape.watch(logits)
        nats = ctc_loss(logits, silent, labels, absent, Context())
    return nats, tf.convert_to_tensor(tape.gradient(nats, logits))


@settings(max_examples=10)
@given(seed=st.integers(0, 99), frames=st.integers(1, 5), text=st.lists(st.integers(1, CLASSES - 1), max_size=3))
def test_equals_the_sum_over_all_alignments(seed, frames, text):
    needed = len(text) + sum(a == b for a, b in itertools.pairwise(text))
    logits = np.random.default_rng(seed).normal(size=(max(frames, needed, 1), CLASSES)).astype(np.float32)
    found = losses([(logits, text)], frames=8, length=4)[0]
    np.testing.assert_allclose(found, by_alignments(logits, text), rtol=TOLERANCE, atol=TOLERANCE)


def test_rows_and_padding_do_not_mix():
    random = np.random.default_rng(0)
    rows = [(random.normal(size=(count, CLASSES)).astype(np.float32), text) for count, text in ((4, [1, 1]), (2, [2]))]
    together = losses(rows, frames=9, length=5)
    alone = [losses([row], frames=len(row[0]), length=len(row[1]))[0] for row in rows]
    np.testing.assert_allclose(together, alone, rtol=TOLERANCE)


def test_gradients_are_differences_of_losses():
    """Of rows with padding, with equal labels and without labels; padding has no gradient."""
    random = np.random.default_rng(1)
    texts, counts, width = ([1, 1], [2, 1, 2], [], [1]), (4, 5, 3, 1), 1e-5
    rows = [(random.normal(size=(count, CLASSES)).astype(np.float32), text) for count, text in zip(counts, texts)]
    _, found = losses_and_gradients(rows, frames=7, length=3)
    for (logits, text), gradient in zip(rows, found):
        expected = np.zeros_like(gradient)
        for place in np.ndindex(logits.shape):
            step = np.zeros(logits.shape)
            step[place] = width
            expected[place] = (by_alignments(logits + step, text) - by_alignments(logits - step, text)) / (2 * width)
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("frames", [1, 2])
def test_compiled_rows_of_few_frames(frames):
    """A label in each frame: the gradient of its softmax alone."""
    logits = np.random.default_rng(3).normal(size=(1, frames, CLASSES)).astype(np.float32)
    text, nothing = tf.constant([[1, 2][:frames]]), tf.zeros((1, frames), tf.bool)

    compiled = tf.function(with_gradient, autograph=False, jit_compile=True)
    _, gradient = compiled(tf.constant(logits), nothing, text, nothing)
    expected = tf.nn.softmax(logits) - tf.one_hot(text, CLASSES)
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=TOLERANCE)


def test_long_transcripts_of_improbable_labels():
    """Labels that have less than e^-707 together, while the model still prefers blanks everywhere, get their gradient.

    By `tf.nn.ctc_loss`, alignments that end too early have more, and blanks become more probable.
    """
    random = np.random.default_rng(2)
    logits, text = random.normal(size=(100, CLASSES)).astype(np.float32), random.integers(1, CLASSES, 40).tolist()
    logits[:, BLANK] += 25.0
    expected = by_states(logits, text)
    assert expected > 900
    (found,), gradient = losses_and_gradients([(logits, text)], frames=103, length=41)
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE)
    # Of the blank, one for each frame minus those that the alignments give it: a label has a frame at least.
    assert gradient[..., BLANK].sum() > 39


def test_too_few_frames_are_infinitely_improbable():
    """Two equal labels need a blank between them."""
    logits = np.zeros((2, CLASSES), np.float32)
    found = losses([(logits, [1, 1]), (logits, [1, 2]), (logits[:1], [1, 2])], frames=4, length=2)
    np.testing.assert_array_equal(np.isinf(found), [True, False, True])


def test_a_row_without_frames_has_no_loss():
    assert losses([(np.zeros((0, CLASSES), np.float32), [])], frames=4, length=2)[0] == 0.0


def test_best_path_is_blank_in_padding():
    logits = np.float32([[[0, 2, 1], [3, 0, 0], [0, 0, 9]]])
    found = best_path(tf.constant(logits), tf.constant([[False, False, True]])).numpy()
    np.testing.assert_array_equal(found, [[1, BLANK, BLANK]])
