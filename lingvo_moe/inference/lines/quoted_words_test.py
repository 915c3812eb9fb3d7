"""The quotes of a single word are put around its translation."""

from __future__ import annotations

import pytest

from lingvo_moe.inference.lines.quoted_words import take_off
from lingvo_moe.inference.lines.unknown_symbols import Framed


@pytest.mark.parametrize(
    "text, expected",
    [
        ('"Abbrechen"', ('"', "Abbrechen", '"')),
        ("'Datei'", ("'", "Datei", "'")),
        ("«Отмена»", ('"', "Отмена", '"')),
        ("« Précédent »", ('"', "Précédent", '"')),
        ("„E-Mail“", ('"', "E-Mail", '"')),
        ("‚Datei‘", ("'", "Datei", "'")),
    ],
)
def test_quotes_of_a_word_are_taken_off(text, expected):
    """Quotes that English does not have become those that it has."""
    assert take_off(Framed("", text, "")) == expected
    assert take_off(Framed("😀 ", text, " 😀")) == (f"😀 {expected[0]}", expected[1], f"{expected[2]} 😀")


@pytest.mark.parametrize(
    "text", ['"Datei öffnen"', '"Datei', "„Datei'", '""', '"', "", '"a" und "b"', '"%s"', "« Zurück"]
)
def test_other_texts_stay(text):
    assert take_off(Framed("", text, "")) == ("", text, "")
