"""Protects the alterations of held-out lines, and a run from a corpus to the table."""

from __future__ import annotations

import json

import pytest

from lingvo_moe.cli import app, main
from lingvo_moe.testing import experiments as tiny
from tools.quality import altered_lines

pytestmark = pytest.mark.slow


def test_one_mark_is_put_before_a_letter_of_a_word():
    """Not into short words, identifiers, addresses or another script; the same text always gets the same one."""
    marked = altered_lines.with_mark("Guten Morgen", "_")
    assert marked.replace("_", "") == "Guten Morgen" and marked.count("_") == 1 and marked.index("_") < 10
    assert marked == altered_lines.with_mark("Guten Morgen", "_")
    for text in ("der Tag", "https://example.org/", "entity_id", "ファイルを開く", "%s", "AT&T"):
        assert altered_lines.with_mark(text, "&") == text


def test_soft_hyphens_are_put_into_long_words():
    assert altered_lines.with_soft_hyphens("Dateien der") == "Dat\u00adeien der"


@pytest.mark.usefixtures("compiled_once")
def test_a_corpus_is_measured(data, tmp_path, capsys):
    """With the flags of `eval`: a row for each alteration."""
    flags = [*tiny.settings(), f"--tokenizers={data.tokenizers}", f"--logdir={tmp_path / 'log'}"]
    corpus = f"--corpus={data.corpus}"
    trained = main.main(["lingvo_moe", "train", *flags, corpus, "--steps=2", "--set=training.evaluate_every=0"])
    assert trained == 0
    capsys.readouterr()
    arguments = ["altered_lines", *flags, corpus, "--max_pairs=6", "--json=-"]
    assert app.execute(altered_lines.main, arguments, altered_lines.FLAGS) == 0
    printed = capsys.readouterr()
    scores = [altered_lines.Altered(**values) for values in json.loads(printed.out)]
    table = altered_lines.table(scores)
    assert f"\n{table}\n" in f"\n{printed.err}"
    _, _, *rows = table.splitlines()
    assert [row.split(" | ")[0].strip("| ") for row in rows] == list(altered_lines.ALTERATIONS)
    assert all(int(row.split(" | ")[1]) > 0 for row in rows)


def test_a_missing_corpus_is_named(capsys):
    """Before anything is loaded."""
    assert app.execute(altered_lines.main, ["altered_lines"], altered_lines.FLAGS) == 2
    assert "--corpus is missing" in capsys.readouterr().err


def test_an_alteration_without_sentences_has_no_scores(tmp_path, capsys):
    """A file that cannot be written is an error before the work."""
    assert altered_lines.table([altered_lines.Altered("x", 0)]).endswith("| x | 0 | - | - | - | - |")
    arguments = ["altered_lines", f"--json={tmp_path}"]
    assert app.execute(altered_lines.main, arguments, altered_lines.FLAGS) == 2
    assert f"--json={tmp_path} is a directory" in capsys.readouterr().err
