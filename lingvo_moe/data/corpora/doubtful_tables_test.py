"""Protects the warnings about a user's tables that look like something else than source and English."""

from __future__ import annotations

from pathlib import Path

import pytest

from lingvo_moe.data.corpora import doubtful_tables

PAIRS = [
    ("Die Datei wurde nicht gefunden.", "The file was not found."),
    ("Der Drucker antwortet nicht.", "The printer does not answer."),
    ("Bitte wählen Sie ein anderes Verzeichnis.", "Please choose another directory."),
    ("Möchten Sie die Änderungen speichern?", "Do you want to save the changes?"),
    ("OK", "OK"),
]


def _write(path: Path, rows: list[tuple[str, ...]]):
    path.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")


@pytest.mark.parametrize("columns", [(), ("de",)])
def test_swapped_columns_are_named(tmp_path, columns):
    """A model would learn to translate English into German, and be scored on it."""
    _write(tmp_path / "right.tsv", [(*columns, *pair) for pair in PAIRS])
    _write(tmp_path / "swapped.tsv", [(*columns, *pair[::-1]) for pair in PAIRS])
    _write(tmp_path / "untranslated.tsv", [(*columns, pair[1], pair[1]) for pair in PAIRS])
    _write(tmp_path / "short.tsv", [(*columns, "yes", "ja")])
    assert doubtful_tables.warnings([tmp_path]) == [
        f"{tmp_path.name}/swapped.tsv: most sources are English, and most texts of the English column are not. "
        "Expected source<TAB>English: swap the columns."
    ]


@pytest.mark.parametrize(
    "row, is_header",
    [
        (("German", "English"), True),
        (("source", "target"), True),
        (("de", "en"), True),
        (("Deutsch", "German"), False),
        (("ja", "yes"), False),
        (("Text", "Text of the message"), False),
    ],
)
def test_a_header_is_named(tmp_path, row, is_header):
    """It would become a pair of texts."""
    _write(tmp_path / "de.tsv", [row, *PAIRS])
    expected = f"de.tsv:1: {'<TAB>'.join(row)} looks like a header, and is read as a pair of texts. Remove it."
    assert doubtful_tables.warnings([tmp_path / "de.tsv"]) == [expected] * is_header
