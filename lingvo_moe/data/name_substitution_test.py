"""Protects name substitution: which words are names, that both sides get the same new ones, repeatably."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings, strategies

from lingvo_moe.data.name_substitution import NameSubstitution, shared_names

_PAIRS = [
    ("Mit Firefox öffnen", "Open with Firefox"),
    ("Über Ubuntu", "About Ubuntu"),
    ("Als PDF sichern", "Save as PDF"),
    ("Das HTML von Ubuntu", "The HTML of Ubuntu"),
]


@pytest.mark.parametrize(
    ("source", "english", "names"),
    [
        ("Firefox und Firefox, Ubuntu", "Ubuntu, or Firefox", ["Ubuntu", "Firefox"]),
        ("Dateiname", "File name", []),
        ("Das problem", "The problem", []),  # lower case: a word that two languages share
        ("&Firefox %Ubuntu \\Nein $Home x_Name", "&Firefox %Ubuntu \\Nein $Home x_Name", []),
        ("/usr/Share und www.Example.org", "/usr/Share and www.Example.org", []),
        ("Qt5 und LibreOffice für Müller", "Qt5 and LibreOffice for Müller", ["Qt5", "LibreOffice", "Müller"]),
        ("Wi-Fi und KDE-Programm", "Wi-Fi and KDE", []),  # the source's word is "KDE-Programm"
    ],
)
def test_names_are_capitalised_words_of_both_sides(source, english, names):
    """No parts of words, placeholders, escapes, paths or addresses, which must stay as they are."""
    assert shared_names(source, english) == names


def test_both_sides_have_the_same_new_name_and_nothing_else_changes():
    """Every occurrence, with parts of the corpus's names of the same kind."""
    substitute = NameSubstitution([_PAIRS], 1.0, seed=0)
    source, english = substitute(7, "Ubuntu und Ubuntu als PDF", "Ubuntu as a PDF with Ubuntu")
    name, acronym = re.fullmatch(r"(\w+) und \1 als (\w+)", source).groups()
    assert english == f"{name} as a {acronym} with {name}"
    assert name in {"Ubuntu", "Ubufox", "Firefox", "Firntu", "Ubuefox"}
    assert acronym in {"PDF", "HTML", "PML", "HTDF"}


def test_the_share_of_the_pairs_with_names_is_kept():
    """Of pairs without names none changes."""
    many = [(f"Über Ubuntu {number}", f"About Ubuntu {number}") for number in range(400)]
    substitute = NameSubstitution([[*_PAIRS, ("Zusatz Gnome", "Extra Gnome")]], 0.25, seed=3)
    changed = sum(substitute(number, *pair) != pair for number, pair in enumerate(many))
    assert 60 <= changed <= 100  # 100 are chosen, of which some get the name that they have
    assert substitute(1, "nichts", "nothing") == ("nichts", "nothing")


def test_a_corpus_without_names_of_a_kind_keeps_them():
    """There are no parts to make acronyms of."""
    substitute = NameSubstitution([[("Über Ubuntu", "About Ubuntu")]], 1.0, seed=0)
    assert substitute(0, "Als PDF", "As PDF") == ("Als PDF", "As PDF")


@settings(max_examples=50)
@given(strategies.integers(0, 1 << 40), strategies.integers(0, 1 << 31))
def test_an_example_is_a_function_of_seed_and_number(number, seed):
    """A resumed stream reads the same texts."""
    first, second = (NameSubstitution([_PAIRS], 0.5, seed) for _ in range(2))
    assert first(number, *_PAIRS[0]) == second(number, *_PAIRS[0])
