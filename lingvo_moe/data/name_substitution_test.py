"""Protects name substitution: which words are names, and that both sides get the same new ones, repeatably."""

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
        ("Firefox und Ubuntu (KDE): Start", "Ubuntu, Firefox (KDE): start", ["Ubuntu", "Firefox", "KDE"]),
        ("Dateiname", "File name", []),
        ("Das problem", "The problem", []),  # lower case: a word that two languages share
        ("Qt5 und Émile Müller", "Qt5 and Émile Müller", ["Qt5", "Émile", "Müller"]),
        ("打开Firefox吧", "Open Firefox", ["Firefox"]),
        ("Firefox를 엽니다", "Opens Firefox", ["Firefox"]),
        ("КDE Firefoxом", "KDE by Firefox", []),  # the K is Cyrillic, as is the ending
        ("Wi-Fi und KDE-Programm", "Wi-Fi and KDE", []),  # the source's word is "KDE-Programm"
        ("Firefox-Profil in Firefox", "Firefox profile in Firefox", []),  # only one of two could change
        ("Firefoxu ve Firefox", "Firefox in Firefox", []),
        ("The Art ist von Knuth", "The book The Art is by Knuth", ["Art", "Knuth"]),
    ],
)  # fmt: skip
def test_names_are_capitalised_words_that_both_sides_have_equally_often(source, english, names):
    """So a name changes on both sides or on neither."""
    assert shared_names(source, english) == names


@pytest.mark.parametrize(
    "text",
    [
        "&Firefox Fire&Fox %Ubuntu \\Nein $Home {Name} ${Name} %(Name)s $(Name) #Name",
        "x_Name Name_x Name/x /usr/Name Http://Foo.de Foo.example.org Name@example.org a@Name.org",
        "Bild.PNG Foo::Bar Call() <Strong>x</Strong>",
    ],
)
def test_what_a_program_reads_is_no_name(text):
    """Placeholders, entities, escapes, identifiers, tags, paths and addresses stay as they are."""
    assert shared_names(text, text) == []


def test_both_sides_have_the_same_new_name_and_nothing_else_changes():
    """Every occurrence, with parts of the corpus's names of the same kind."""
    substitute = NameSubstitution([_PAIRS], 1.0, seed=0)
    seen = set()
    for number in range(30):
        source, english = substitute(number, "Ubuntu und Ubuntu als PDF", "Ubuntu as a PDF with Ubuntu")
        name, acronym = re.fullmatch(r"(\w+) und \1 als (\w+)", source).groups()
        assert english == f"{name} as a {acronym} with {name}"
        seen |= {name, acronym}
    assert seen == {"Ubuntu", "Ubuefox", "Firefox", "Firntu", "PDF", "HTML", "PML", "HTDF"}


def test_ordinary_words_keep_their_place():
    """A word that the corpus's English mostly writes in lower case is no name where a title has a capital."""
    corpus = [("Normal Ubuntu", "Normal Ubuntu"), ("a", "normal"), ("b", "normal ubuntu")]
    substitute = NameSubstitution([corpus, _PAIRS[:1]], 1.0, seed=0)
    found = {substitute(number, "Normal und Ubuntu", "Normal and Ubuntu")[1] for number in range(30)}
    assert found == {f"Normal and {name}" for name in ("Ubuntu", "Ubuefox", "Firefox", "Firntu")}


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


def test_seed_and_number_decide():
    """Otherwise every epoch would have the same new names."""
    first, second = (NameSubstitution([_PAIRS], 1.0, seed) for seed in (1, 2))
    of_first, again, of_second = (
        [substitute(number, *_PAIRS[0]) for number in range(10)] for substitute in (first, first, second)
    )
    assert of_first == again != of_second and len(set(of_first)) > 1


def test_the_names_of_an_example_never_change():
    """A checkpoint has a position in the stream: another process must read the same names there."""
    names = "Firefox Ubuntu Debian Gnome Konqueror Thunderbird LibreOffice Internationalizer".split()
    substitute = NameSubstitution([[(f"Über {name}", f"About {name}") for name in names]], 1.0, seed=5)
    found = [substitute(number, "Gnome und Debian", "Debian and Gnome")[1] for number in (0, 2, 6)]
    assert found == ["Debome and Konqefox", "Internerbird and InternOffice", "Debntu and Konqalizer"]


@settings(max_examples=30)
@given(strategies.integers(0, 1 << 40), strategies.integers(0, 1 << 31))
def test_an_example_does_not_depend_on_those_before(number, seed):
    """A resumed stream reads the same texts."""
    used, fresh = (NameSubstitution([_PAIRS], 0.5, seed) for _ in range(2))
    used(number + 1, *_PAIRS[1])
    assert used(number, *_PAIRS[0]) == fresh(number, *_PAIRS[0])
