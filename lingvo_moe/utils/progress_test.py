"""Progress tells what is done, how fast and how long it will take: in plain lines in a log, in a bar on a terminal."""

from __future__ import annotations

import io

import pytest

from lingvo_moe.utils import progress


class Clock:
    """Stands for `time`, and goes on when it is told to."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def test_a_log_gets_a_line_every_ten_seconds_and_one_at_the_end(clock, capsys):
    """A thousand steps are not a thousand lines; rate and time left are of this run alone, also of a resumed one."""
    with progress.bar("training", 100, "steps", done=40) as advance:
        for _ in range(30):
            clock.now += 0.5
            advance(note="loss 2.5")
    assert capsys.readouterr().err.splitlines() == [
        "training: 60/100 steps, 2 steps/s, 10 s, 20 s left  loss 2.5",
        "training: 70/100 steps, 2 steps/s, 15 s, 15 s left  done",
    ]


def test_without_a_total_there_is_no_time_left(clock, capsys):
    with progress.bar("reading", None, "lines") as advance:
        clock.now += 12
        advance(24)
    assert capsys.readouterr().err.splitlines()[0] == "reading: 24 lines, 2 lines/s, 12 s"


def test_what_fails_is_not_called_done(clock, capsys):
    with pytest.raises(KeyError), progress.bar("reading", 3, "lines"):
        raise KeyError
    assert capsys.readouterr().err.endswith("stopped\n")


def test_track_counts_what_it_yields(clock, capsys):
    assert list(progress.track([3, 1, 2], "sorting", unit="numbers")) == [3, 1, 2]
    assert capsys.readouterr().err.startswith("sorting: 3/3 numbers")


def test_a_terminal_gets_a_bar_with_names_as_they_are(monkeypatch):
    """Brackets in a file's name are no markup."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", terminal)
    with progress.bar("reading [red]a[/red]", 4, "lines") as advance:
        advance(4, note="[bold]")
    drawn = terminal.getvalue()
    assert "reading [red]a[/red]" in drawn and "4/4" in drawn and "lines/s" in drawn and "[bold]" in drawn
