"""Samples follow the probabilities of the model, cut off as `top_k` and `top_p` say, and their seeds alone."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from lingvo_moe.decoding.flat_beam_search import BeamSearch, Hypotheses
from lingvo_moe.decoding.sampling import Sampling, sample
from lingvo_moe.errors import UserError
from lingvo_moe.lazy import tf
from lingvo_moe.ops.context import Context

_VOCABULARY, _ROWS, _SAMPLES = 80, 8, 500
_LOGITS = np.random.RandomState(0).normal(scale=2.0, size=_VOCABULARY).astype(np.float32)
_FORBIDDEN = (0, 2, 3)


def _sampled(sampling: Sampling, seed: int = 0, rows: int = _ROWS, logits: np.ndarray = _LOGITS) -> Hypotheses:
    """Samples of a model whose logits are always the same."""

    def step(state, ids, paddings, position, first, mask):
        del paddings, position, first, mask
        return tf.broadcast_to(tf.constant(logits), (*ids.shape, len(logits))), state

    inputs = sampling.inputs(np.array([[seed, row] for row in range(rows)], np.int32))

    @tf.function(autograph=False)
    def run():
        found = sample(sampling.of_program, step, {}, tf.fill((rows,), True), inputs, Context())
        return found.ids, found.scores, found.lengths

    return Hypotheses(*(value.numpy() for value in run()))


def _first_tokens(logits: np.ndarray = _LOGITS, **settings) -> np.ndarray:
    """How often each token is drawn first."""
    sampling = Sampling(samples=_SAMPLES, search=BeamSearch(max_length=1), **settings)
    return np.bincount(_sampled(sampling, logits=logits).ids.ravel(), minlength=_VOCABULARY)


def _probabilities(temperature: float = 1.0) -> np.ndarray:
    scaled = np.where(np.isin(np.arange(_VOCABULARY), _FORBIDDEN), -np.inf, _LOGITS.astype(np.float64) / temperature)
    return np.exp(scaled - np.logaddexp.reduce(scaled))


def _is_drawn_from(counts: np.ndarray, probabilities: np.ndarray) -> bool:
    """Whether counts are within five standard deviations of chi-square; tokens of few draws count as one."""
    assert not counts[probabilities == 0].any()
    expected = probabilities / probabilities.sum() * counts.sum()
    many = expected >= 5
    pairs = [*zip(counts[many], expected[many]), (counts[~many].sum(), expected[~many].sum())]
    chi_square = sum((count - mean) ** 2 / mean for count, mean in pairs if mean)
    freedom = len([mean for _, mean in pairs if mean]) - 1
    return abs(chi_square - freedom) < 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_tokens_are_drawn_with_the_probabilities_of_the_model(temperature):
    assert _is_drawn_from(_first_tokens(temperature=temperature), _probabilities(temperature))
    assert not _is_drawn_from(_first_tokens(temperature=temperature), _probabilities(1.3 * temperature))


@pytest.mark.parametrize("top_k", [1, 5, 70, 1000])
def test_one_of_the_most_probable_tokens_is_drawn(top_k):
    """By a selection of few, or by a sort; more than there are leave all."""
    probabilities = _probabilities()
    kept = np.sort(probabilities)[::-1][min(top_k, _VOCABULARY) - 1]
    counts = _first_tokens(top_k=top_k)
    if top_k == 1:
        assert counts[np.argmax(probabilities)] == counts.sum()
    else:
        assert _is_drawn_from(counts, np.where(probabilities >= kept, probabilities, 0.0))


@pytest.mark.parametrize("settings", [{"top_p": 0.6}, {"top_p": 0.9, "temperature": 2.0}, {"top_p": 0.7, "top_k": 6}])
def test_the_fewest_tokens_that_have_a_share_of_the_probability_are_kept(settings):
    probabilities = _probabilities(settings.get("temperature", 1.0))
    order = np.argsort(-probabilities)[: settings.get("top_k", _VOCABULARY)]
    total = np.cumsum(probabilities[order] / probabilities[order].sum())
    nucleus = order[: 1 + np.searchsorted(total, settings["top_p"])]
    assert 1 < len(nucleus) < len(order)
    assert _is_drawn_from(
        _first_tokens(**settings), np.where(np.isin(np.arange(_VOCABULARY), nucleus), probabilities, 0)
    )


def test_a_nucleus_has_at_least_one_token():
    assert set(np.flatnonzero(_first_tokens(top_p=1e-6))) == {np.argmax(_probabilities())}


def test_equally_probable_tokens_are_all_in_the_nucleus():
    """Logits in bfloat16 are often equal; their order in the vocabulary does not say which of them is drawn."""
    is_probable = np.isin(np.arange(_VOCABULARY), (7, 20, 41, 42, 79))
    counts = _first_tokens(np.where(is_probable, 9.0, 0.0).astype(np.float32), top_p=0.5)
    assert _is_drawn_from(counts, is_probable.astype(float))


def test_a_nucleus_is_found_without_a_sort():
    """On a CPU, a sort of 8000 tokens took ten times as long as the rest of a step."""

    def step(logits, ids, *_):
        return tf.broadcast_to(logits, (*ids.shape, _VOCABULARY)), logits

    def run(logits, inputs):  # constants would be sorted before
        return sample(Sampling(), step, logits, tf.fill((2,), True), inputs, Context(platform="cpu")).ids

    compiled = tf.function(run, jit_compile=True, autograph=False)
    inputs = Sampling(top_p=0.9).inputs(np.zeros((2, 2), np.int32))
    arguments = tf.constant(_LOGITS), {name: tf.constant(value) for name, value in inputs.items()}
    hlo = compiled.experimental_get_compiler_ir(*arguments)(stage="hlo").lower()
    assert not re.search(r"sort|top_?k", hlo)


def test_samples_end_with_eos_and_differ():
    """What follows eos is 0; each token, sample, prompt and seed has random numbers of its own."""
    sampling = Sampling(samples=4, search=BeamSearch(max_length=6, eos_id=int(np.argmax(_probabilities()))))
    found, other = _sampled(sampling), _sampled(sampling, seed=1)
    assert len({length for row in found.lengths for length in row}) > 2
    for ids, length in zip(found.ids.reshape(-1, 6), found.lengths.ravel()):
        ended = np.flatnonzero(ids == sampling.search.eos_id)
        assert length == (ended[0] + 1 if len(ended) else 6) and not ids[length:].any()
    texts = {tuple(ids) for ids in np.concatenate([found.ids, other.ids]).reshape(-1, 6) if np.count_nonzero(ids) > 3}
    long = [ids for ids in np.concatenate([found.ids, other.ids]).reshape(-1, 6) if np.count_nonzero(ids) > 3]
    assert len(texts) == len(long) > 10
    np.testing.assert_array_equal(found.ids, _sampled(sampling).ids)


def test_a_step_attends_to_the_own_positions_of_a_sample():
    """The two samples write positions 0 and 1, then 2 and 3: neither sees the other's."""
    masks, paddings = [], []

    def step(state, ids, padding, position, first, mask):
        assert int(first) == 2 * int(position)
        masks.append(mask.numpy().astype(int))
        paddings.append(padding.numpy())
        logits = np.where(np.arange(8) == (1 if len(masks) == 2 else 5), 50.0, 0.0).astype(np.float32)
        return tf.broadcast_to(tf.constant(logits), (*ids.shape, 8)), state

    sampling, present = Sampling(samples=2, search=BeamSearch(max_length=3)), tf.constant([True, False])
    found = sample(sampling, step, {}, present, sampling.inputs(np.zeros((2, 2), np.int32)), Context())
    np.testing.assert_array_equal(masks[1][0], [[1, 0, 1, 0, 0, 0], [0, 1, 0, 1, 0, 0]])
    np.testing.assert_array_equal(paddings, [[[False] * 2, [True] * 2]] * 2)
    np.testing.assert_array_equal(found.lengths, [[2, 2], [0, 0]])


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"temperature": 0.0}, "sampling.temperature is 0.0; expected at least 0.01"),
        ({"top_p": 0.0}, "sampling.top_p is 0.0; expected a number above 0"),
        ({"top_p": 1.5}, "sampling.top_p is 1.5"),
        ({"top_k": -1}, "sampling.top_k is -1"),
        ({"samples": 0}, "sampling.samples is 0"),
        ({"samples": 2.5}, "sampling.samples is 2.5; expected a whole number"),
        ({"top_p": None}, "sampling.top_p is None; expected a number above 0"),
        ({"search": 64}, "sampling.search is an int; expected a BeamSearch"),
        (
            {"samples": 10**8},
            "sampling.samples 100000000 x search.max_length 64 are 6400000000 positions .* expected at most 16777216",
        ),
    ],
)
def test_impossible_settings_are_errors(settings, message):
    with pytest.raises(UserError, match=message):
        Sampling(**settings)
