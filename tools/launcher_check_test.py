"""The launcher check refuses what it cannot check before it starts anything. What it finds is in docs/processes.md."""

from __future__ import annotations

from lingvo_moe.cli import app
from tools import launcher_check


def test_mistakes_are_reported_before_anything_is_started(tmp_path, capsys):
    (tmp_path / "old").write_text("")
    for arguments, message in (
        ([f"--directory={tmp_path}"], "is not empty; name a new directory"),
        ([f"--directory={tmp_path / 'new'}", "--launchers=horn"], "--launchers=horn is not installed here"),
    ):
        assert app.execute(launcher_check.main, ["launcher_check", *arguments], launcher_check._VALUES) == 2
        assert message in capsys.readouterr().err
