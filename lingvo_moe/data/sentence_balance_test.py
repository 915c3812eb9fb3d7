"""Protects sampling by English sentence: how often a pair stands in its language's list, and that no pair is lost."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings, strategies

from lingvo_moe.data.corpus import Pairs
from lingvo_moe.data.sentence_balance import RESOLUTION, RepeatedPairs, balance_sentences

# Of each language, the English sentences that it has; "common" is in all three, "rare" in one.
_SENTENCES = {"de": ["common", "two", "rare"], "fr": ["common", "two"], "it": ["common"]}


@pytest.fixture
def languages(tmp_path) -> list[Pairs]:
    """The pairs of _SENTENCES, in its order."""
    for language, sentences in _SENTENCES.items():
        lines = (f"{language} {sentence}\t{sentence}\n" for sentence in sentences)
        (tmp_path / f"{language}.tsv").write_text("".join(lines))
    return [Pairs(tmp_path / f"{language}.tsv") for language in _SENTENCES]


def test_every_sentence_is_read_equally_often_with_balance_1(languages):
    """Counted over all languages, and but for rounding."""
    counts = Counter(english for pairs in balance_sentences(languages, 1.0) for _, english in pairs)
    assert counts == {"common": 3 * round(RESOLUTION / 3), "two": RESOLUTION, "rare": RESOLUTION}


def test_half_a_balance_is_the_square_root(languages):
    """The definition: in proportion to k ** -balance."""
    german = Counter(english for _, english in balance_sentences(languages, 0.5)[0])
    assert german == {"common": round(RESOLUTION / 3**0.5), "two": round(RESOLUTION / 2**0.5), "rare": RESOLUTION}


def test_a_sentence_in_a_great_many_pairs_keeps_a_place(tmp_path):
    """A weight that rounds to 0 would lose the pair."""
    (tmp_path / "de.tsv").write_text("".join(f"{number}\tcommon\n" for number in range(3 * RESOLUTION)))
    (pairs,) = balance_sentences([Pairs(tmp_path / "de.tsv")], 1.0)
    assert [source for source, _ in pairs] == [str(number) for number in range(3 * RESOLUTION)]


@settings(max_examples=50)
@given(strategies.lists(strategies.integers(1, 5), min_size=1, max_size=20))
def test_repeated_pairs_are_the_list_with_copies(weights):
    """Index by index; there are no others."""
    pairs = [(f"source {index}", f"english {index}") for index in range(len(weights))]
    expected = [pair for pair, weight in zip(pairs, weights, strict=True) for _ in range(weight)]
    repeated = RepeatedPairs(pairs, np.array(weights))
    assert list(repeated) == expected
    for index in (-1, len(expected)):
        with pytest.raises(IndexError, match=f"pair {index} of {len(expected)}"):
            repeated[index]
