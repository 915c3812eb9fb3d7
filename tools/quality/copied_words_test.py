"""Protects the share of copied words: by hand, from a file and a corpus, and one-line errors."""

from __future__ import annotations

import pytest

from lingvo_moe.cli import app
from lingvo_moe.testing.corpora import write_corpus
from tools.quality import copied_words

# "Firefox" and "Emacs" are copied, "Ubuntu" is misspelt, "Linux" is frequent, "pad" is short, "Haus" is in the source
# alone.
_LINES = (
    "de\t0.5000\tFirefox auf Linux\tFirefox on Linux\tFirefox on Linux\n"
    "fr\t0.5000\tUbuntu Haus pad\tUbunto house pad\tUbuntu house pad\n"
    "ja\t0.5000\tEmacsを開く\topen Emacs\tOpen Emacs\n"
)


def _run(*arguments: str) -> int:
    for name in copied_words.FLAGS:  # flags keep their values until the process ends
        copied_words.FLAGS[name].unparse()
    return app.execute(copied_words.main, ["copied_words", *arguments], copied_words.FLAGS)


def _flags(directory) -> list[str]:
    """Writes a file and a corpus with "Linux" three times; returns the flags that name them."""
    (directory / "read.tsv").write_text(_LINES, encoding="utf-8")
    pairs = [("ein", "Linux, Linux"), ("zwei", "a Linux_Firefox")]
    write_corpus(directory / "corpus", {"de": {"train": pairs}, "fr": {"test": [("un", "Emacs")]}})
    return [f"--translations={directory / 'read.tsv'}", f"--trained_on={directory / 'corpus'}"]


@pytest.mark.parametrize(
    "max_count, expected", [(2, "2 of 3 rare words"), (3, "3 of 4 rare words"), (0, "1 of 2 rare words")]
)
def test_frequent_words_do_not_count(max_count, expected, tmp_path, capsys):
    """One translation of each counts; with --max_count=0 only a word that training never had."""
    assert _run(*_flags(tmp_path), f"--max_count={max_count}") == 0
    assert capsys.readouterr().out.startswith(expected)


def test_the_share_and_the_sentences():
    """Sentences without a rare word are in the number of all sentences alone."""
    word = frozenset(["Ubuntu"])
    found = [copied_words.Sentence(word, word), copied_words.Sentence(frozenset(), word)]
    assert copied_words.summary(found, []).endswith("are in the translation, 100 %, in 1 of 2 sentences")
    assert copied_words.summary(found, word) == "no source shares a rare word with its reference"


@pytest.mark.parametrize(
    "text, message",
    [
        (b"de\t0.5\tone\ttwo\n", "line 1 has 4 fields; expected the 5 of `eval --translations`"),
        (b"de\t0.5\ta\tb\tc\n\xff\n", "line 2 is not UTF-8 (byte 1 of the line)"),
        (b"", "line 1 has 1 fields"),
        (None, "No such file"),
    ],
)
def test_mistakes_are_one_line(text, message, tmp_path, capsys):
    flags = _flags(tmp_path)
    (tmp_path / "read.tsv").unlink()
    if text is not None:
        (tmp_path / "read.tsv").write_bytes(text)
    assert _run(*flags) == 2
    (error,) = capsys.readouterr().err.strip().splitlines()
    assert error.startswith("error: --translations=") and message in error
    assert _run() == 2 and "--translations is missing" in capsys.readouterr().err
