"""A line is divided at what is copied, and comes back unchanged if its texts do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lingvo_moe.inference.line_parts import LineParts, divide


@pytest.mark.parametrize(
    "line, texts, between",
    [
        ("Datei öffnen", ["Datei öffnen"], ["", ""]),
        ("  Datei  öffnen ", ["Datei  öffnen"], ["  ", " "]),
        ("Datei\tOrdner\t12\tGröße\r", ["Datei", "Ordner", "Größe"], ["", "\t", "\t12\t", "\r"]),
        (r"Zeile\n  Zeile\n\n", ["Zeile", "Zeile"], ["", r"\n  ", r"\n\n"]),
        (r"Kopieren\tStrg+C", ["Kopieren", "Strg+C"], ["", r"\t", ""]),
        (r"C:\neu\test fehlt, a\\nb", [r"C:\neu\test fehlt, a\\nb"], ["", ""]),
        ('<a\thref="x">Datei</a>', ['<a\thref="x">Datei</a>'], ["", ""]),
        ("Kennwort ;", ["Kennwort"], ["", " ;"]),
        ("Τι είναι;", ["Τι είναι;"], ["", ""]),
        ("Datei&nbsp;", ["Datei&nbsp;"], ["", ""]),
        ("<keine Auswahl>", ["<keine Auswahl>"], ["", ""]),
        ("%s: 12;", [""], ["%s: 12;", ""]),
        (" ", [""], [" ", ""]),
        ("", [""], ["", ""]),
    ],
)
def test_white_space_escapes_and_parts_without_words_are_copied(line, texts, between):
    assert divide(line) == LineParts(texts, between)


@given(st.text("aä1 ;\t\r\\\\ntu%s<>&\u2028Τ", max_size=20))
def test_every_line_comes_back(line):
    """Its texts have no separators at their ends, so that nothing is lost when they are tidied."""
    divided = divide(line)
    assert divided.around(divided.texts) == line
    assert all(text == text.strip() for text in divided.texts)


def test_a_long_line_takes_no_longer_than_its_length():
    """A search that starts again at each character would take minutes."""
    for repeated in (" ", " a", r"\n", ";", " ;", "\t", "a\t", "&a;"):
        line = 20_000 * repeated
        assert divide(line).between
