"""Protects the counts of lines that are taken for English, and one-line errors."""

from __future__ import annotations

import pytest

from lingvo_moe.cli import app
from lingvo_moe.testing.corpora import write_corpus
from tools.quality import english_lines


def _run(*arguments: str) -> int:
    for name in english_lines.FLAGS:  # flags keep their values until the process ends
        english_lines.FLAGS[name].unparse()
    return app.execute(english_lines.main, ["english_lines", *arguments], english_lines.FLAGS)


def test_lines_of_both_sides_are_counted(tmp_path, capsys):
    """Of equal English sentences one counts; the lines that are wrongly taken for English are listed."""
    found, opened = "The file was not found.", "Open the folder."
    german = [("Die Datei wurde nicht gefunden.", found), ("Open the folder, bitte", opened)]
    french = [("Fichier introuvable.", found)]
    write_corpus(tmp_path / "corpus", {"de": {"train": [("Datei", "File")], "test": german}, "fr": {"test": french}})
    assert _run(f"--corpus={tmp_path / 'corpus'}") == 0
    _, _, english, others, *listed = capsys.readouterr().out.splitlines()
    assert english == "| in English | 2 | 2 | 100.0% |" and others == "| in other languages | 3 | 1 | 33.3% |"
    assert listed == ["de\tOpen the folder, bitte"]


@pytest.mark.parametrize(
    "flags, message",
    [
        ([], "--corpus is missing"),
        (["--corpus={}"], "has no test sentences"),
        (["--corpus={}", "--tokenizers={}"], "is a corpus, and has no tokenizers"),
    ],
)
def test_what_is_missing_is_named(flags, message, tmp_path, capsys):
    write_corpus(tmp_path / "corpus", {"de": {"train": [("Datei", "File")]}})
    assert _run(*(flag.format(tmp_path / "corpus") for flag in flags)) == 2
    assert message in capsys.readouterr().err
