"""Translations have the ellipses, superscripts and symbols of their line."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lingvo_moe.inference.lines.compatibility_characters import restore


@pytest.mark.parametrize(
    ("text", "translation", "expected"),
    [
        ("Öffnen…", "Open...", "Open…"),
        ("正在打开……", "Opening...", "Opening…"),
        ("Laden… und ...", "Loading... and ...", "Loading... and ..."),
        ("Laden", "Loading...", "Loading..."),
        ("5 m² und 10 cm³", "5 m2 and 10 cm3", "5 m² and 10 cm³"),
        ("m² oder m2", "m2 or m2", "m2 or m2"),
        ("CO₂-Ausstoß", "CO2 emissions", "CO₂ emissions"),
        ("½ Tasse", "1\u20442 cup", "½ cup"),
        ("Firefox™ öffnen", "Open FirefoxTM", "Open Firefox™"),
        ("x² ist 22", "x2 is x22", "x² is x22"),
        ("1º capítulo", "Chapter 1", "Chapter 1"),
        ("5m²的面积", "area of 5m2", "area of 5m²"),
        ("Graﬁk（neu）", "Grafik (new)", "Grafik (new)"),
        ("№ 5: Нет, 20℃, 5㎏", "No 5: No, 20°C, 5kg", "No 5: No, 20°C, 5kg"),
        ("Բացել․", "Open. Close.", "Open. Close."),
        ("Fini\u00a0!", "Finished !", "Finished !"),
        ("", "a...", "a..."),
        ("© Firma", "(c) Company", "© Company"),
        ("© (c) Firma", "(c) (c) Company", "(c) (c) Company"),
        ("%d:%02d übrig", "%d\u2236%02d remaining", "%d:%02d remaining"),
        ("1\u22362", "1\u22362", "1\u22362"),
    ],
)
def test_characters_of_the_line_return(text, translation, expected):
    """Not letters, spaces, wide characters and what English has otherwise; and not where the line has both forms."""
    assert restore(text, translation) == expected


@given(st.text("a1.2…²½™ m", max_size=20))
def test_what_a_tokenizer_replaces_is_restored(text):
    """A translation that copies its line is the line, but for what the line has in both forms."""
    plain = unicodedata.normalize("NFKC", text)
    restored = restore(text, plain)
    assert unicodedata.normalize("NFKC", restored) == plain
    if not any(form in text for form in ("...", "1", "2")):
        assert restored.count("…") == text.count("…")


def test_a_long_text_takes_no_longer_than_its_length():
    """A search that is quadratic in the length would take minutes for a book."""
    for text in [
        20_000 * "…",
        20_000 * "a²",
        20_000 * "½ ",
        400_000 * "a" + " ²",
        " ".join(map("a{}²".format, range(99_999))),
    ]:
        assert restore(text, text) == text
