"""A journal has every line that was appended, whatever ended the process, and is gone when the work is done."""

from __future__ import annotations

import fcntl
import pathlib
import time

import pytest

from lingvo_moe.errors import UserError
from lingvo_moe.inference.journal import journal
from lingvo_moe.inference.lines.translation import Translation

_LINES = [
    [
        Translation("File “a”\u2028not found", -0.1234567890123, (((5, 6), (7,)), ((8,), (9, 10))), 0.7),
        Translation("", -1.0),
    ],
    [Translation("", 0.0), Translation("\ttwo", -3.5, (((), ()),), 0.25)],
]


_NAME = "out.0123abcd.partial"


def _journal(path: pathlib.Path):
    output, run, _ = str(path).rsplit(".", 2)
    return journal(output, run)


@pytest.fixture
def interrupted(tmp_path):
    """Returns the path of a journal of two lines."""
    path = tmp_path / _NAME
    with pytest.raises(KeyboardInterrupt), _journal(path) as opened:
        opened.append(_LINES)
        raise KeyboardInterrupt
    return path


def test_translations_are_read_as_they_were(interrupted):
    """Scores to the last digit; more lines follow them; the file goes with the end of the work."""
    with pytest.raises(ZeroDivisionError), _journal(interrupted) as opened:
        assert opened.lines == 2 and list(opened.read()) == _LINES
        opened.append(_LINES[:1])
        raise ZeroDivisionError
    with _journal(interrupted) as opened:
        assert opened.lines == 3 and list(opened.read()) == [*_LINES, _LINES[0]]
    assert not interrupted.exists()


@pytest.mark.parametrize("removed", [1, 20])
def test_a_line_that_is_not_complete_is_cut_off(interrupted, removed):
    """Of a process that was killed while it wrote."""
    interrupted.write_bytes(interrupted.read_bytes()[:-removed])
    with _journal(interrupted) as opened:
        opened.append(_LINES[1:])
        assert opened.lines == 2 and list(opened.read()) == _LINES


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    """The system names a file only if it cannot open it."""
    with (
        open("/dev/full", "ab", buffering=0) as full,
        pytest.raises(OSError) as error,
        _journal(tmp_path / _NAME) as opened,
    ):
        monkeypatch.setattr(opened, "_file", full)
        opened.append(_LINES)
    assert error.value.filename == str(tmp_path / _NAME)


def test_a_run_that_fails_before_its_first_line_leaves_no_file(tmp_path):
    """An error before the work changes nothing."""
    with pytest.raises(UserError), _journal(tmp_path / _NAME):
        raise UserError("no checkpoint")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "line", [b"[]\n", b"[[1\n", b"[3]\n", b'[["a", 1.0]]\n', b'[["a", 1.0, [[1]], 0.5]]\n', b"\xff\n"]
)
def test_another_content_is_an_error(tmp_path, caplog, line):
    """It names the line and the remedy, says nothing of continuing, and the file stays."""
    path = tmp_path / _NAME
    caplog.set_level("INFO")
    path.write_bytes(line)
    with pytest.raises(UserError, match=r"partial, line 1: .*delete the file"), _journal(path) as opened:
        list(opened.read())
    assert path.read_bytes() == line and "continues" not in caplog.text


def test_a_journal_that_was_deleted_meanwhile_does_not_fail_the_run(tmp_path):
    """Its translations are complete by then; leaving the context would raise FileNotFoundError."""
    with _journal(tmp_path / _NAME) as opened:
        opened.append(_LINES)
        (tmp_path / _NAME).unlink()
        assert opened.lines == len(_LINES)
    assert not list(tmp_path.iterdir())


def test_a_file_that_another_process_removes_before_it_is_locked_is_opened_anew(tmp_path, monkeypatch):
    """The lock of a file without a name keeps no other process away, and its lines would be lost."""
    path, flock, locked = tmp_path / _NAME, fcntl.flock, []

    def remove_and_lock(file, operation):
        if not locked:
            path.unlink()
        locked.append(file)
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", remove_and_lock)
    with pytest.raises(KeyboardInterrupt), _journal(path) as opened:
        opened.append(_LINES)
        raise KeyboardInterrupt
    assert len(locked) == 2
    with _journal(path) as opened:
        assert list(opened.read()) == _LINES


def test_two_processes_do_not_write_the_same_journal(tmp_path):
    """Their lines would mix. The second one leaves the file of the first alone."""
    path = tmp_path / _NAME
    with _journal(path):
        with pytest.raises(UserError, match="another process is making the same translations"), _journal(path):
            pass
        assert path.exists()


def test_a_process_that_reports_a_journal_keeps_no_other_from_it(interrupted, monkeypatch):
    """It locks the journals of other runs for a moment, to see whether they are in use."""
    with open(interrupted, "rb") as reporting:
        fcntl.flock(reporting, fcntl.LOCK_SH)
        monkeypatch.setattr(time, "sleep", lambda seconds: fcntl.flock(reporting, fcntl.LOCK_UN))
        with _journal(interrupted) as opened:
            assert opened.lines == len(_LINES)


def test_journals_of_other_runs_are_named(interrupted, caplog):
    """Unless a process has them open: those that nobody will use take up space, and the others are in use."""
    caplog.set_level("INFO")
    output, other = interrupted.with_name("out"), interrupted.with_name("other.0123abcd.partial")
    with journal(output, "4567abcd"), journal(output, "89ababcd"), _journal(other):
        pass
    assert [record.getMessage().split(" ")[0] for record in caplog.records] == [str(interrupted)] * 2
