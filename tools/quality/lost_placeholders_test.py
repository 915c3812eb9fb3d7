"""Protects which lines are counted, and a run from files to the table."""

from __future__ import annotations

import pytest

from lingvo_moe.cli import app, main
from lingvo_moe.testing import experiments as tiny
from tools.quality import lost_placeholders

pytestmark = pytest.mark.slow


def test_kinds_of_lines():
    """A tag with an address in it is a tag."""
    assert lost_placeholders.kinds('%s: <a href="https://a.de/">a@b.de</a>') == {"placeholders", "tags", "addresses"}
    assert lost_placeholders.kinds('<a href="https://a.de/">hier</a>') == {"tags"}
    assert lost_placeholders.kinds("100 % <Datei> in /etc/a und B_C") == {"numbers", "paths", "codes"}
    assert lost_placeholders.kinds("<Datei>") == set()


@pytest.mark.usefixtures("compiled_once")
def test_files_are_counted(data, tmp_path, capsys):
    """Lines whose reference keeps what the source has, each kind in its row; a model of two steps loses all."""
    flags = [*tiny.settings(), f"--tokenizers={data.tokenizers}", f"--logdir={tmp_path / 'log'}"]
    train = [f"--corpus={data.corpus}", "--steps=2", "--set=training.evaluate_every=0"]
    assert main.main(["lingvo_moe", "train", *flags, *train]) == 0
    capsys.readouterr()
    rows = ["neerg %s der\tgreen %s red", "eulb %d\tblue %s", "gib\tbig", "der a@b.de\tred a@b.de", "der {n}\tred {n}"]
    (tmp_path / "de.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    arguments = ["lost_placeholders", *flags, "--preset=none", f"--input={tmp_path / 'de.tsv'}", "--languages=de"]
    assert app.execute(lost_placeholders.main, arguments, lost_placeholders.FLAGS) == 0
    _, _, *table = capsys.readouterr().out.splitlines()
    assert table == [
        "| placeholders | 2 | 0 | 0.0 % |",
        "| tags | 0 | 0 | - |",
        "| addresses | 1 | 0 | 0.0 % |",
        *(f"| {kind} | 0 | 0 | - |" for kind in ("paths", "codes", "numbers")),
    ]


def test_sources_without_such_lines_are_an_error(tmp_path, capsys):
    """Before anything is loaded."""
    (tmp_path / "de.tsv").write_text("gib\tbig\n", encoding="utf-8")
    arguments = ["lost_placeholders", "--preset=none", f"--input={tmp_path / 'de.tsv'}", "--languages=de"]
    assert app.execute(lost_placeholders.main, arguments, lost_placeholders.FLAGS) == 2
    assert "no line of de has placeholders, tags" in capsys.readouterr().err
