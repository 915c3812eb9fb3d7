"""A language model continues prompts: over a cache as over whole texts, on any mesh, by search and by sampling."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np
import pytest

from lingvo_moe import tree
from lingvo_moe.decoding.flat_beam_search import BeamSearch
from lingvo_moe.decoding.sampling import Sampling, input_specs
from lingvo_moe.engines.pjrt import Engine
from lingvo_moe.layers.attention import causal_mask
from lingvo_moe.layers.base import Context
from lingvo_moe.layers.transformer import Masks
from lingvo_moe.lazy import tf
from lingvo_moe.models.language_model import LanguageModel
from lingvo_moe.optimizers.adafactor import Adafactor
from lingvo_moe.sharding.layout import DeviceMesh, Layout, Spec
from lingvo_moe.steps import Steps
from lingvo_moe.testing import harness

pytestmark = pytest.mark.slow

_VOCABULARY, _BATCH, _LENGTH, _MAX_LENGTH = 8, 8, 8, 3
_MODEL = LanguageModel(
    target_vocabulary=_VOCABULARY,
    num_layers=2,
    model_dim=16,
    hidden_dim=32,
    num_heads=2,
    head_dim=8,
    num_experts=8,
    num_groups=8,
)
_VARIANTS = {
    "loop": {},
    "unrolled": {"unroll": True},
    "tied": {"tied_embeddings": True},
    "pipeline": {"num_layers": 4, "pipeline": "gpipe", "stages": 2, "microbatches": 2, "remat": "full"},
}
# As in language_model_test: some 50 float32 products and sums in a row, ordered differently.
_TOLERANCE = 64 * harness.FLOAT32_ROUNDING
# Twice as many candidates as all 16 texts of two words have next tokens, so that none is left out.
_EXHAUSTIVE = BeamSearch(beam_size=40, max_length=_MAX_LENGTH)
_BEAM = BeamSearch(beam_size=4, max_length=_MAX_LENGTH)
_SAMPLING = Sampling(samples=3, temperature=1.5, top_k=4, top_p=0.95, search=BeamSearch(max_length=_MAX_LENGTH))
_PROMPTS = ((), (5, 7), (4, 4, 6, 7), (6,), (7, 5, 4), (4,), (5, 5), (6, 4))


@functools.cache
def _theta(model: LanguageModel) -> dict:
    """Weights with a sharp softmax, so that hypotheses differ by more than rounding."""
    state = Engine(1).compile(Steps(model, Adafactor(), Layout()).init())({"seed": np.array([0, 8], np.int32)})["state"]
    values = tree.map_leaves(np.array, state["theta"])
    if "softmax" in values:
        values["softmax"]["projection"] *= 2.5
    return values


def _source(prompts: tuple[tuple[int, ...], ...] = _PROMPTS) -> dict[str, np.ndarray]:
    """A batch of prompts with bos; rows without one are empty."""
    source = {field: np.zeros((_BATCH, _LENGTH), np.int32) for field in ("ids", "segment_ids", "positions")}
    for row, prompt in enumerate(prompts):
        span = slice(0, len(prompt) + 1)
        source["ids"][row, span], source["segment_ids"][row, span] = [2, *prompt], 1
        source["positions"][row, span] = np.arange(len(prompt) + 1)
    return source


@functools.cache
def _compiled(model: LanguageModel, search: BeamSearch | Sampling, mesh: DeviceMesh):
    specs = {field: Spec((_BATCH, _LENGTH), "int32", "BS") for field in ("ids", "segment_ids", "positions")}
    if isinstance(search, Sampling):
        specs["sampling"] = input_specs(_BATCH)
    steps = Steps(model, Adafactor(), Layout.of(mesh), "cpu")
    decoding = Engine(mesh.size).decoding(steps, specs, search)
    decoding.load(_theta(model))
    return decoding


def _decode(
    search: BeamSearch | Sampling,
    source: dict,
    mesh: DeviceMesh = DeviceMesh(),
    model: LanguageModel = _MODEL,
    seeds: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    if isinstance(search, Sampling):
        seeds = np.int32([[1, row] for row in range(_BATCH)]) if seeds is None else seeds
        source = {**source, "sampling": search.inputs(seeds)}
    return {name: np.asarray(value) for name, value in _compiled(model, search, mesh).decode(source).items()}


def _log_probabilities(model: LanguageModel, texts: list[tuple[int, ...]]) -> np.ndarray:
    """Of each token after each token of whole texts, each in a row of its own: `[B, T, V]`, as training computes it."""
    length = max(map(len, texts))
    ids, segments = np.zeros((2, len(texts), length), np.int32)
    for row, text in enumerate(texts):
        ids[row, : len(text)], segments[row, : len(text)] = text, 1
    # Capacity and groups are those of inference, which drops no token, in any batch.
    plain = dataclasses.replace(model, pipeline="none", stages=1, microbatches=1, num_groups=1)
    context, theta = Context(), tree.map_leaves(tf.constant, _theta(model))
    masks = Masks(causal_mask(tf.constant(segments)), tf.equal(segments, 0))
    positions = tf.tile(tf.range(length)[None], (len(texts), 1))
    inputs = plain._look_up("embedding", theta, tf.constant(ids), positions, context)
    outputs, _ = plain._layers["decoder"](theta["decoder"], inputs, None, masks, context)
    logits = plain._softmax(_VOCABULARY)(plain._softmax_theta(theta), outputs, context).numpy().astype(np.float64)
    logits[..., [0, 2, 3]] = -np.inf
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


def _all_continuations(model: LanguageModel, prompt: tuple[int, ...]) -> list[tuple[float, tuple[int, ...]]]:
    """Every continuation with its score: those that end, best first, then those of the greatest length that do not."""
    words = range(4, _VOCABULARY)
    texts = list(itertools.product(words, repeat=_MAX_LENGTH))
    log_probabilities = _log_probabilities(model, [(2, *prompt, *text) for text in texts])
    scores: dict[tuple[int, ...], float] = {}
    for text, of_text in zip(texts, log_probabilities[:, len(prompt) :]):
        total = 0.0
        for t, token in enumerate(text):
            scores[(*text[:t], 1)] = (total + of_text[t, 1]) / ((6 + t) / 6) ** _EXHAUSTIVE.length_alpha
            total += of_text[t, token]
        scores[text] = total / ((5 + _MAX_LENGTH) / 6) ** _EXHAUSTIVE.length_alpha
    ended, cut = ([(score, text) for text, score in scores.items() if (1 in text) == ends] for ends in (True, False))
    return sorted(ended, reverse=True) + sorted(cut, reverse=True)


@pytest.mark.parametrize("variant", _VARIANTS)
def test_the_hypotheses_are_the_best_of_all_continuations(variant):
    """Of prompts of every length, the empty one among them; scores are those of whole texts without a cache."""
    model = dataclasses.replace(_MODEL, **_VARIANTS[variant])
    found = _decode(_EXHAUSTIVE, _source(), model=model)
    for row, prompt in enumerate(_PROMPTS[:4]):
        expected = _all_continuations(model, prompt)
        for k in range(_EXHAUSTIVE.beam_size):
            text = tuple(found["ids"][row, k, : found["lengths"][row, k]].tolist())
            score, best = expected[k]
            assert text == best
            assert found["scores"][row, k] == pytest.approx(score, abs=_TOLERANCE)


@pytest.mark.parametrize("mesh", [(2,), (2, 2), (8,)], ids=str)
@pytest.mark.parametrize("search", [_BEAM, _SAMPLING], ids=["beam", "sampling"])
def test_partitioned_equals_unpartitioned(search, mesh):
    one, many = _decode(search, _source()), _decode(search, _source(), DeviceMesh(mesh))
    np.testing.assert_array_equal(many["ids"], one["ids"])
    np.testing.assert_array_equal(many["lengths"], one["lengths"])
    np.testing.assert_allclose(many["scores"], one["scores"], atol=_TOLERANCE)


@pytest.mark.parametrize("search", [_BEAM, _SAMPLING], ids=["beam", "sampling"])
def test_a_continuation_does_not_depend_on_the_batch(search):
    """The prompts of the other rows, and the row itself, change nothing; nor does an empty row among them."""
    row = 4
    expected = _decode(search, _source())
    moved = _source(((7, 5), _PROMPTS[row], (6,)))
    seeds = np.int32([[1, row]] * _BATCH)
    found = _decode(search, moved, seeds=seeds)
    np.testing.assert_array_equal(found["ids"][1], expected["ids"][row])
    np.testing.assert_allclose(found["scores"][1], expected["scores"][row], atol=_TOLERANCE)


@pytest.mark.parametrize("search", [_BEAM, _SAMPLING], ids=["beam", "sampling"])
def test_short_prompts_are_continued_as_beside_long_ones(search):
    """They are read in a quarter of the columns, where the longest may be two tokens after bos, the last one aside."""
    expected, short = _decode(search, _source()), (5, 6, 7)
    found = _decode(
        search, {field: np.where(np.arange(_BATCH)[:, None] < 5, 0, ids) for field, ids in _source().items()}
    )
    for row in short:
        np.testing.assert_array_equal(found["ids"][row], expected["ids"][row])
        np.testing.assert_allclose(found["scores"][row], expected["scores"][row], atol=_TOLERANCE)


def test_the_score_of_a_sample_is_the_mean_log_probability_of_its_tokens():
    """As the model has them, without temperature and truncation, over whole texts."""
    found = _decode(_SAMPLING, _source())
    for row, prompt in enumerate(_PROMPTS):
        for k in range(_SAMPLING.samples):
            text = found["ids"][row, k, : found["lengths"][row, k]].tolist()
            (of_text,) = _log_probabilities(_MODEL, [(2, *prompt, *text)])
            tokens = [of_text[len(prompt) + t, token] for t, token in enumerate(text)]
            assert found["scores"][row, k] == pytest.approx(np.mean(tokens), abs=_TOLERANCE)
            assert text[-1] == 1 or len(text) == _MAX_LENGTH
