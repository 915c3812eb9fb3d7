"""Protects progress reports: count, rate and remaining time, as plain lines in a log and as a bar on a terminal."""

from __future__ import annotations

import io

import pytest

from lingvo_moe.utils import progress


class Clock:
    """A substitute for the module `time` whose clock the test sets."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def test_log_has_a_line_every_ten_seconds_and_one_at_the_end(clock, capsys):
    """A thousand steps are not a thousand lines; rate and remaining time are those of this run alone."""
    with progress.bar("training", 100, "steps", done=40) as advance:
        for _ in range(30):
            clock.now += 0.5
            advance(note="loss 2.5")
    assert capsys.readouterr().err.splitlines() == [
        "training: 60/100 steps, 2 steps/s, 10 s, 20 s left  loss 2.5",
        "training: 70/100 steps, 2 steps/s, 15 s, 15 s left  done",
    ]


def test_unknown_total_has_no_remaining_time(clock, capsys):
    """A file of unknown length is read with count and rate alone."""
    with progress.bar("reading", None, "lines") as advance:
        clock.now += 12
        advance(24)
    assert capsys.readouterr().err.splitlines()[0] == "reading: 24 lines, 2 lines/s, 12 s"


def test_failed_operation_ends_with_stopped(clock, capsys):
    """The log does not claim success."""
    with pytest.raises(KeyError), progress.bar("reading", 3, "lines"):
        raise KeyError
    assert capsys.readouterr().err.endswith("stopped\n")


def test_progress_can_be_hidden(capsys):
    """Until the block ends, also where it fails."""
    with pytest.raises(KeyError), progress.hidden(), progress.bar("reading", 3, "lines") as advance:
        advance()
        raise KeyError
    assert capsys.readouterr().err == ""
    list(progress.track([1], "reading"))
    assert capsys.readouterr().err.startswith("reading: 1/1")


def test_track_counts_items(clock, capsys):
    """The total comes from the length of the items."""
    assert list(progress.track([3, 1, 2], "sorting", unit="numbers")) == [3, 1, 2]
    assert capsys.readouterr().err.startswith("sorting: 3/3 numbers")


def test_terminal_has_a_bar_with_literal_names(monkeypatch):
    """Brackets in a file's name are not markup."""

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


@pytest.mark.parametrize("stdout_is_terminal", [False, True])
def test_what_is_printed_meanwhile_goes_where_it_belongs(monkeypatch, stdout_is_terminal):
    """Into the file that standard output is; on the terminal that shows both, above the bar."""

    class Stream(io.StringIO):
        def __init__(self, is_terminal: bool):
            super().__init__()
            self.is_terminal = is_terminal

        def isatty(self) -> bool:
            return self.is_terminal

    output, terminal = Stream(stdout_is_terminal), Stream(True)
    monkeypatch.setattr("sys.stdout", output)
    monkeypatch.setattr("sys.stderr", terminal)
    with progress.bar("translating", 2, "sentences"):
        print("File not found")
    assert (output.getvalue() == "File not found\n") != stdout_is_terminal
    assert ("File not found" in terminal.getvalue()) == stdout_is_terminal
