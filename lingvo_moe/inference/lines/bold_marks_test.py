"""Marks of bold text are tags to the model, and marks again in its translation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lingvo_moe.inference.lines.bold_marks import Tagged, tag


@pytest.mark.parametrize(
    ("text", "tagged"),
    [
        ("Klicken Sie auf **Senden**.", Tagged("Klicken Sie auf <b>Senden</b>.", True)),
        ("**{a}** und **送信**を", Tagged("<b>{a}</b> und <b>送信</b>を", True)),
        ("**Ja**, 2 * 3", Tagged("<b>Ja</b>, 2 * 3", True)),
        ("**Datei** öffnen**", Tagged("**Datei** öffnen**")),
        ("**<b>Datei</b>**", Tagged("**<b>Datei</b>**")),
        ("2**3**4 und ***Datei***", Tagged("2**3**4 und ***Datei***")),
        ("** Datei **", Tagged("** Datei **")),
        ("**/*.py und **/*.c", Tagged("**/*.py und **/*.c")),
        ("", Tagged("")),
    ],
)
def test_pairs_of_marks_become_tags(text, tagged):
    """If all are in pairs, beside the words that they enclose."""
    assert tag(text) == tagged


def test_tags_of_the_translation_become_marks():
    """However the model writes them; a text without marks keeps tags of its own."""
    assert tag("**Senden** wählen").mark("Select <b>Send</b> < b >now</ B >") == "Select **Send** **now**"
    assert tag("<b>Senden</b> wählen").mark("Select <b>Send</b>") == "Select <b>Send</b>"


@given(st.text("*ab <>/", max_size=30))
def test_any_text_returns_as_it_was(text):
    assert tag(text).mark(tag(text).text) == text


def test_a_long_text_takes_no_longer_than_its_length():
    for repeated in ("*", "**", "**a", "**a ", "** a", "***a"):
        assert tag(20_000 * repeated)
