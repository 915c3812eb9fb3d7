"""Formats of values in turn: a translation has them in the order of its text, or with numbers."""

from __future__ import annotations

import pytest

from lingvo_moe.inference.lines.positional_formats import formats, has_more_numbers, number, number_as, without_numbers


@pytest.mark.parametrize(
    "text, expected",
    [
        ("%s fehlt in %d", ["%s", "%d"]),
        ("%-5s: %02d, %ld, %.1f%%", ["%-5s", "%02d", "%ld", "%.1f"]),
        ("{} von {}", ["{}", "{}"]),
        ("%50 von 50%", []),
        ("%1$s von %s", []),
        ("%1 von %2", []),
        ("%*d von %s", []),
        ("{0} von {}", []),
        ("%s von {}", []),
        ("%(name)s von {size}", []),
        ("%[1]d von %d", []),
    ],
)
def test_formats_of_values_in_turn(text, expected):
    """Numbers, names and formats of two kinds are read otherwise."""
    assert formats(text) == expected


@pytest.mark.parametrize(
    "text, numbered",
    [("%s: %d von %d", "%1$s: %2$d von %3$d"), ("%-5s|%.1f %%", "%1$-5s|%2$.1f %%"), ("{} von {}", "{0} von {1}")],
)
def test_numbers_are_added_and_removed(text, numbered):
    """In order, a program needs none; out of order, it does."""
    assert number(text) == numbered and without_numbers(numbered) == text
    assert has_more_numbers(text, numbered) and not has_more_numbers(text, text)


@pytest.mark.parametrize("translation", ["%2$d of %1$d", "{1} of {0}", "no formats", "%1$s and %3$s"])
def test_numbers_that_are_needed_stay(translation):
    assert without_numbers(translation) == translation


@pytest.mark.parametrize(
    "text, translation, expected",
    [
        ("In %s sind %d Fehler", "%d errors in %s", "%2$d errors in %1$s"),
        ("%s, %d, %u", "%u, %s, %d", "%3$u, %1$s, %2$d"),
        ("In %s sind %d Fehler", "%s has %d errors", "%s has %d errors"),
        ("In %s sind %d Fehler", "errors in %s", "errors in %s"),
        ("%d von %d in %s", "in %s: %d of %d", "in %s: %d of %d"),
    ],
)
def test_formats_that_change_places_are_numbered(text, translation, expected):
    """Unless two are equal: which of them is which is not known."""
    assert number_as(text, translation) == expected
