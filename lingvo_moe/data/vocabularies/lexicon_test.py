"""Protects the alignment of pieces: it is IBM Model 1, and finds the translations of a synthetic language."""

from __future__ import annotations

import collections

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lingvo_moe.data.vocabularies import lexicon

_SIZES = 12, 9  # pieces of the source, of the target
_SOURCE, _TARGET = (st.lists(st.integers(4, size - 1), max_size=5) for size in _SIZES)


def _model_1(pairs, iterations):
    """Brown et al. 1993 by dictionaries, one sentence pair after another."""
    probability = collections.defaultdict(lambda: 1.0)
    for _ in range(iterations):
        counts = collections.defaultdict(float)
        for source, target in pairs:
            for word in target:
                total = sum(probability[cause, word] for cause in [*source, 3])
                for cause in [*source, 3]:
                    counts[cause, word] += probability[cause, word] / total
        totals = collections.Counter()
        for (cause, _), count in counts.items():
            totals[cause] += count
        probability = collections.defaultdict(float, {key: count / totals[key[0]] for key, count in counts.items()})
    return probability


@given(st.lists(st.tuples(_SOURCE, _TARGET), max_size=8))
def test_the_table_is_that_of_model_1(pairs):
    table = lexicon.translation_probabilities(
        [(np.array(source, np.int32), np.array(target, np.int32)) for source, target in pairs], *_SIZES
    )
    used = [pair for pair in pairs if all(pair)]
    expected = np.zeros(_SIZES)
    for key, value in _model_1(used, lexicon.ITERATIONS).items():
        expected[key] = value
    np.testing.assert_allclose(table, expected, rtol=1e-4, atol=1e-6)


def test_chunks_do_not_change_the_table(monkeypatch):
    """A large sample is counted in parts."""
    generator = np.random.default_rng(0)
    pairs = [
        tuple(generator.integers(4, 40, generator.integers(1, 9)).astype(np.int32) for _ in range(2)) for _ in range(50)
    ]
    whole = lexicon.translation_probabilities(pairs, 40, 40)
    monkeypatch.setattr(lexicon, "_CHUNK", 7)
    np.testing.assert_allclose(lexicon.translation_probabilities(pairs, 40, 40), whole, rtol=1e-5)


def test_translations_are_found_without_an_alignment():
    """Piece i is translated by piece i + 40, in any order, after a piece that is in each target."""
    generator = np.random.default_rng(1)
    pairs = []
    for _ in range(400):
        source = generator.choice(np.arange(5, 40), 5, replace=False).astype(np.int32)
        pairs.append((source, np.append(generator.permutation(source + 40), 4).astype(np.int32)))
    table = lexicon.translation_probabilities(pairs, 80, 80)
    assert (table[5:40].argmax(axis=1) == np.arange(45, 80)).all()
    # What each target has comes from no piece of the source.
    assert table[3].argmax() == 4
    np.testing.assert_allclose(table[5:40].sum(axis=1), 1, rtol=1e-5)
    assert not table[40:].any()
