"""Error rates are those of the recursive definition of the edit distance."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lingvo_moe.inference.error_rates import ErrorRates, edit_distance, majority_transcript


@functools.cache
def by_recursion(one: str, other: str) -> int:
    if not one or not other:
        return len(one) + len(other)
    return min(
        by_recursion(one[1:], other) + 1,
        by_recursion(one, other[1:]) + 1,
        by_recursion(one[1:], other[1:]) + (one[0] != other[0]),
    )


@given(st.text("abc", max_size=6), st.text("abc", max_size=6))
def test_edit_distance_equals_its_definition(one, other):
    assert edit_distance(one, other) == by_recursion(one, other)


def test_rates_are_of_all_references_together():
    """Two of seven letters and spaces, and one of two words; an empty transcript has as many edits as letters."""
    assert ErrorRates.of(["ab xd", ""], ["ab cd", "ef"]) == ErrorRates(100 * 3 / 7, 100 * 2 / 3)
    assert ErrorRates.of(["ab cd"], ["ab cd"]) == ErrorRates(0.0, 0.0)


def test_references_without_a_word_are_an_error():
    with pytest.raises(ValueError, match="no word"):
        ErrorRates.of(["a"], [" "])


def test_majority_is_the_most_frequent_word():
    assert majority_transcript(["the cat saw the dog", "the end", "a b c"]) == "the the the"
    assert majority_transcript([]) == ""
