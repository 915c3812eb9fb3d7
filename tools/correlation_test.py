"""Protects the rank correlation in words: SciPy would print a warning and nan for equal values."""

from __future__ import annotations

import pytest

from tools import correlation


@pytest.mark.parametrize(
    "first, second, expected",
    [
        ((0.1, 0.2, 0.9), (1, 50, 51), "1.000"),
        ((0.1, 0.2, 0.9), (51, 50, 1), "-1.000"),
        ((0.1, 0.2, 0.9), (1, 2, 2), "0.866"),  # sqrt(3) / 2
        ((0.1, 0.2), (3, 3), "not defined: all second are equal"),
        ((0.1, 0.1), (3, 4), "not defined: all first are equal"),
        ((0.1,), (3,), "not defined: all first are equal"),
    ],
)
def test_the_correlation_is_spearmans_where_it_is_defined(first, second, expected):
    assert correlation.text({"first": first, "second": second}, 3) == expected
