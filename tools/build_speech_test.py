"""Protects the command line of speech corpora: one command from sentences to recordings, one-line errors."""

from __future__ import annotations

import pytest

from lingvo_moe.cli import app
from lingvo_moe.data.corpus import Corpus
from tools import build_speech

WORDS = "red blue green house tree river stone bird window garden".split()


def _run(*arguments: str) -> int:
    return app.execute(build_speech.main, ["build_speech", *arguments], build_speech.FLAGS)


@pytest.mark.slow
def test_sentences_of_ones_own_become_recordings(tmp_path, capsys):
    """English is the target of all pairs; German is a language of them."""
    lines = [f"Das {a} und {b}\tThe {a} and the {b}\n" for a in WORDS for b in WORDS]
    (tmp_path / "de.tsv").write_text("".join(lines), encoding="utf-8")
    arguments = ("--preset=none", f"--input={tmp_path / 'de.tsv'}", f"--output={tmp_path / 'speech'}")
    assert _run(*arguments, "--languages=en,de") == 0
    corpus = Corpus.open(tmp_path / "speech")
    assert {voice[:3] for voice in corpus.languages_of("train")} == {"en_", "de_"}
    assert _run(*arguments, "--languages=en,de") == 0 and "is up to date" in capsys.readouterr().out


@pytest.mark.slow
def test_english_of_ones_own_files_needs_no_certain_languages(tmp_path):
    """All files are read, and not those of the languages that presets are read for."""
    lines = [f"Het {a} en {b}\tThe {a} and the {b}\n" for a in WORDS for b in WORDS]
    (tmp_path / "nl.tsv").write_text("".join(lines), encoding="utf-8")
    arguments = ("--preset=none", f"--input={tmp_path / 'nl.tsv'}", f"--output={tmp_path / 'speech'}")
    assert _run(*arguments) == 0
    assert {voice[:3] for voice in Corpus.open(tmp_path / "speech").languages_of("train")} == {"en_"}


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((), "--output is missing"),
        (("--output=x", "stray"), "stray"),
        (("--output=x", "--preset=none"), "nothing to build a corpus from"),
        (("--output=x", "--languages=DE"), "--languages=DE"),
        (("--output=x", "--languages=de,en_GB"), "--languages=en_GB: expected en, or languages of the preset"),
        (("--output=x", "--languages="), "--languages=: expected en, or languages of the preset"),
    ],
)
def test_mistakes_are_one_line(arguments, message, capsys, tmp_path, monkeypatch):
    """Nothing is written."""
    monkeypatch.chdir(tmp_path)
    assert _run(*arguments) == 2
    assert message in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_an_output_that_cannot_be_made_is_found_before_the_sentences_are_read(capsys, tmp_path):
    """Reading them takes minutes, with downloads."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("", encoding="utf-8")
    for output, message in (("file/speech", "cannot be made"), ("mine", "left unchanged")):
        assert _run(f"--output={tmp_path / output}", "--preset=none") == 2
        assert message in capsys.readouterr().err
