"""Protects the division of texts into sentences: a wrong one would pair sentences that do not translate each other."""

from __future__ import annotations

import pytest

from lingvo_moe.data.corpora.catalogs import Entry
from lingvo_moe.data.corpora.sentence_source import Sentences
from lingvo_moe.data.corpora.sources import EntrySource


def _divided(english: str, translation: str) -> list[tuple[str, str]]:
    (file,) = Sentences(EntrySource("prose", [Entry("ja", english, translation, True)])).files()
    entries = list(file.entries)
    assert all((entry.language, entry.fuzzy) == ("ja", True) for entry in entries)
    return [(entry.english, entry.translation) for entry in entries]


@pytest.mark.parametrize(
    "text, sentences",
    [
        ("One. Two?  Three! Four", ["One.", "Two?", "Three!", "Four"]),
        ("Trees, e.g. oaks. Dr. No came", ["Trees, e.g. oaks.", "Dr. No came"]),
        ("In trees (e.g. Oaks. Elms.) too. Yes.", ["In trees (e.g. Oaks. Elms.) too.", "Yes."]),
        ("Am 31. Dezember 1899. Bis 2010. Dann", ["Am 31. Dezember 1899.", "Bis 2010.", "Dann"]),
        ("z. B. Bäume. Version 3.5 ist da.", ["z. B. Bäume.", "Version 3.5 ist da."]),
        ('Say "yes." Then go. and more', ['Say "yes."', "Then go. and more"]),
        ("打开。关闭！吗？", ["打开。", "关闭！", "吗？"]),
        ("彼は「はい。」と言う。次です。", ["彼は「はい。」", "と言う。", "次です。"]),
        ("はい。{emailLink}に。", ["はい。", "{emailLink}に。"]),
        ("なに？！次です。", ["なに？！", "次です。"]),
        ("1. Open. . .", ["1. Open. . ."]),
        ("In the U.S. English is used. Yes.", ["In the U.S. English is used.", "Yes."]),
        ("", [""]),
    ],
)
def test_a_sentence_ends_after_its_mark_and_what_closes_it(text, sentences):
    """Not after an abbreviation, an ordinal or before a small letter, and not inside parentheses."""
    assert _divided(text, text) == [(sentence, sentence) for sentence in sentences]


def test_text_with_other_numbers_of_sentences_is_kept_whole():
    """Which sentence answers which is not known."""
    assert _divided("Open it. Close it.", "Öffnen und schließen.") == [("Open it. Close it.", "Öffnen und schließen.")]


def test_identity_and_name_differ_from_those_of_the_divided_source():
    """A corpus of the divided texts is another one."""
    source = EntrySource("prose", [Entry("de", "One. Two.", "Eins. Zwei.")])
    assert Sentences(source).identity() != source.identity()
    assert (Sentences(source).name, Sentences(source, "divided").name) == ("prose", "divided")
