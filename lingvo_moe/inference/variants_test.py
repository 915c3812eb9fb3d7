"""The other ways to write a text, and back."""

from __future__ import annotations

import pytest

from lingvo_moe.inference.variants import variants


@pytest.mark.parametrize(
    "text, expected",
    [
        ("Datei nicht gefunden", ["datei nicht gefunden", "Datei nicht gefunden."]),
        ("Öffnen…", ["öffnen…"]),
        ("Datei:", ["datei:"]),
        ("USB-Gerät", ["USB-Gerät."]),
        ("İptal", ["İptal."]),
        ("datei (neu)", []),
        ("5 %", ["5 %."]),
        ("ファイル", ["ファイル."]),
        ("", []),
    ],
)
def test_texts_are_written_with_a_small_letter_and_with_a_full_stop(text, expected):
    """Abbreviations keep their capitals, and what has an end keeps it."""
    assert [variant.text for variant in variants(text)] == expected


def test_translations_are_written_as_those_of_the_text():
    small, stop = variants("Datei nicht gefunden")
    assert (small.undo("file not found"), small.undo("")) == ("File not found", "")
    assert [stop.undo(each) for each in ("File not found.", "File not found", "Wait...")] == [
        "File not found",
        "File not found",
        "Wait...",
    ]
