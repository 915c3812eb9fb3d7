"""Protects the command line that makes a corpus of recordings: its summary names the settings of other sample rates."""

from __future__ import annotations

import wave

import pytest

from lingvo_moe.cli import app
from tools import import_speech


def _run(*arguments: str) -> int:
    return app.execute(import_speech.main, ["import_speech", *arguments], import_speech.FLAGS)


@pytest.mark.parametrize(
    "rate, settings",
    [
        (22_050, None),
        (16_000, "--set input.features.sample_rate=16000\n"),
        (8000, "--set input.features.sample_rate=8000 --set input.features.highest=4000.0\n"),
    ],
)
def test_another_sample_rate_needs_settings(tmp_path, capsys, rate, settings):
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes(bytes(100))
    (tmp_path / "table.tsv").write_text("train\ten_anna\ta.wav\tgood morning\n")
    assert _run(f"--table={tmp_path / 'table.tsv'}", f"--output={tmp_path / 'corpus'}") == 0
    printed = capsys.readouterr().out
    assert "built: 1 voice, 1 train, 0 valid, 0 test recordings" in printed
    assert printed.endswith(settings) if settings else "--set" not in printed


@pytest.mark.parametrize(
    "arguments, message",
    [((), "--table is missing"), (("--table=x",), "--output is missing"), (("--table=x", "--output=y", "z"), "'z'")],
)
def test_mistakes_are_errors(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert _run(*arguments) == 2
    assert message in capsys.readouterr().err and not list(tmp_path.iterdir())
