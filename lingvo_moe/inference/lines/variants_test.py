"""The other ways to write a text, and back."""

from __future__ import annotations

import pytest

from lingvo_moe.inference.lines.variants import variants


@pytest.mark.parametrize(
    "text, expected",
    [
        ("Datei nicht gefunden", ["datei nicht gefunden", "Datei nicht gefunden."]),
        ("Öffnen…", ["öffnen…"]),
        ("Datei:", ["datei:"]),
        ("USB-Gerät", ["USB-Gerät."]),
        ("İptal", ["İptal."]),
        ("Isıtma", ["Isıtma."]),
        ("Ist da", ["ist da", "Ist da."]),
        ("Config.yaml fehlt", ["Config.yaml fehlt."]),
        ("datei (neu)", []),
        ("5 %", ["5 %."]),
        ("ファイル", ["ファイル."]),
        ("", []),
    ],
)
def test_texts_are_written_with_a_small_letter_and_with_a_full_stop(text, expected):
    """Abbreviations keep their capitals, and what has an end keeps it."""
    assert [variant.text for variant in variants(text)] == expected


@pytest.mark.parametrize(
    "translation, with_capital, without_stop",
    [
        ("file not found.", "File not found.", "file not found"),
        ("file not found", "File not found", "file not found"),
        ("eBay used", "eBay used", "eBay used"),
        ("https://a.de is new.", "https://a.de is new.", "https://a.de is new"),
        ("{name} is new", "{name} is new", "{name} is new"),
        ("wait...", "Wait...", "wait..."),
        ("files, etc.", "Files, etc.", "files, etc."),
        ("at 5 p.m.", "At 5 p.m.", "at 5 p.m."),
        ("", "", ""),
    ],
)
def test_translations_are_written_as_those_of_the_text(translation, with_capital, without_stop):
    """Names and what must be kept have no capital, abbreviations keep their stop."""
    small, stop = variants("Datei nicht gefunden")
    assert (small.undo(translation), stop.undo(translation)) == (with_capital, without_stop)
