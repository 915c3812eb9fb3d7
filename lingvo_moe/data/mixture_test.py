"""Protects temperature sampling: a pure function of (seed, n), exact language frequencies, epochs of each language."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies

from lingvo_moe.data.mixture import WINDOW, Mixture, permute
from lingvo_moe.errors import UserError

_SIZES = strategies.lists(strategies.integers(0, 10**6), min_size=1, max_size=50).filter(any).map(tuple)
_TEMPERATURES = strategies.sampled_from([0.5, 1.0, 5.0, 100.0, math.inf])


@settings(max_examples=200)
@given(strategies.integers(1, 3000), strategies.integers(0, 2**64 - 1))
def test_permute_is_a_permutation_of_any_size(size, key):
    """Every entry occurs once."""
    assert sorted(permute(np.arange(size), size, np.array([key], np.uint64))) == list(range(size))


def test_permute_keys_give_different_and_well_mixed_orders():
    """Over the keys, every entry of a small permutation is at every position about equally often."""
    keys = np.random.default_rng(0).integers(2**64, size=7000, dtype=np.uint64)
    for entry in range(7):
        counts = np.bincount(permute(np.full(7000, entry), 7, keys), minlength=7)
        assert np.all(np.abs(counts - 1000) < 4 * np.sqrt(1000))  # 4 standard deviations


@given(_SIZES, _TEMPERATURES)
def test_window_has_each_language_by_its_rounded_probability(sizes, temperature):
    """Every language with pairs occurs, and quotas differ from p_l * WINDOW by rounding alone."""
    mixture = Mixture(sizes, temperature)
    weights = np.array([float(size) ** (1 / temperature) if size else 0.0 for size in sizes])
    ideal = weights / weights.sum() * WINDOW
    assert mixture.quotas.sum() == WINDOW
    assert np.all((mixture.quotas > 0) == (np.array(sizes) > 0))
    # By less than one, and by one more for each language that was raised to its one example.
    assert np.all(np.abs(mixture.quotas - ideal) < 1 + np.sum((ideal > 0) & (ideal < 1)))


def test_temperature_limits():
    """Infinity: all equal; 1: in proportion; 5: the fifth root of the proportions."""
    sizes = (10, 1000, 100_000)
    assert Mixture(sizes, math.inf).quotas.tolist() == [WINDOW // 3 + 1, WINDOW // 3, WINDOW // 3]
    np.testing.assert_allclose(Mixture(sizes, 1.0).quotas / WINDOW, np.array(sizes) / sum(sizes), atol=1 / WINDOW)
    fifth_root = Mixture(sizes, 5.0).quotas
    np.testing.assert_allclose(fifth_root[1:] / fifth_root[:-1], 100**0.2, rtol=1e-4)


def test_every_window_is_exact_and_evenly_mixed():
    """The quotas hold in each window, and approximately in each sixteenth of one."""
    mixture = Mixture((5, 50, 5000), 5.0, seed=1)
    languages, _ = mixture.sample(np.arange(3 * WINDOW))
    for window in languages.reshape(3, WINDOW):
        assert np.bincount(window).tolist() == mixture.quotas.tolist()
        for part in window.reshape(16, -1):  # within 6 standard deviations of the expected count
            expected = mixture.quotas / 16
            assert np.all(np.abs(np.bincount(part, minlength=3) - expected) < 6 * np.sqrt(expected))
    assert not np.array_equal(languages[:WINDOW], languages[WINDOW : 2 * WINDOW])


def test_language_is_sampled_epoch_by_epoch():
    """No pair repeats within an epoch, across windows too, and epochs differ in their order."""
    sizes = (7, 100, 30_000)
    languages, indices = Mixture(sizes, 5.0).sample(np.arange(2 * WINDOW))
    for language, size in enumerate(sizes):
        seen = indices[languages == language]
        epochs = seen[: len(seen) // size * size].reshape(-1, size)
        assert len(epochs) >= 2
        assert np.all(np.sort(epochs) == np.arange(size))
        assert not np.array_equal(epochs[0], epochs[1])


@pytest.mark.slow
@given(
    strategies.lists(strategies.integers(0, 5000), min_size=1, max_size=4).filter(any),
    _TEMPERATURES,
    strategies.integers(0, 2**64 - 1),
)
def test_every_epoch_of_any_language_has_every_pair_once(sizes, temperature, seed):
    """For all sizes: a window may end anywhere in an epoch."""
    languages, indices = Mixture(tuple(sizes), temperature, seed).sample(np.arange(WINDOW + WINDOW // 2))
    for language, size in enumerate(sizes):
        seen = indices[languages == language]
        epochs, rest = (seen[: len(seen) // size * size].reshape(-1, size), len(seen) % size) if size else (seen, 0)
        assert np.all(np.sort(epochs) == np.arange(size))
        assert len(np.unique(seen[len(seen) - rest :])) == rest


@given(strategies.lists(strategies.integers(0, 2**40), min_size=1, max_size=30))
def test_example_depends_on_its_index_alone(numbers):
    """So a stream resumes anywhere, and hosts may sample in any order."""
    together = np.stack(Mixture((3, 400, 50_000), 5.0, seed=9).sample(np.array(numbers)))
    alone = [np.stack(Mixture((3, 400, 50_000), 5.0, seed=9).sample(np.array([number]))) for number in numbers[:3]]
    np.testing.assert_array_equal(together[:, :3], np.concatenate(alone, axis=1))


def test_hosts_share_the_stream_without_overlap():
    """Host i of n takes every nth example."""
    mixture, numbers = Mixture((10, 200, 3000), 5.0), np.arange(3000)
    stream = np.stack(mixture.sample(numbers))
    for host in range(3):
        np.testing.assert_array_equal(np.stack(mixture.sample(numbers[host::3])), stream[:, host::3])


def test_seeds_give_different_streams():
    """Of languages and of pairs."""
    first, second = (np.stack(Mixture((100, 100), 1.0, seed).sample(np.arange(200))) for seed in (0, 1))
    assert not np.array_equal(first[0], second[0])
    assert not np.array_equal(first[1], second[1])


def test_the_stream_never_changes():
    """A checkpoint has a position in the stream: any version of this program must find the same examples there."""
    numbers = np.array([0, 1, 2, WINDOW, 10**9, 10**12])
    languages, indices = Mixture((3, 400, 0, 50_000), 5.0, seed=2**40 + 1).sample(numbers)
    assert languages.tolist() == [3, 1, 1, 3, 3, 3]
    assert indices.tolist() == [25638, 7, 263, 39297, 9881, 6182]


@pytest.mark.parametrize(
    "sizes, temperature, message",
    [
        ((), 5.0, "no training pairs"),
        ((0, 0), 5.0, "no training pairs"),
        ((1,), 0.0, "temperature=0.0"),
        ((1,), -1.0, "above 0"),
        ((1,), math.nan, "temperature=nan"),
        ((1,) * (WINDOW + 1), 5.0, "more than a mixture"),
    ],
)
def test_invalid_mixture_is_an_error(sizes, temperature, message):
    """No pairs, a bad temperature, or too many languages."""
    with pytest.raises(UserError, match=message):
        Mixture(sizes, temperature)
