"""The launcher check refuses what it cannot check, and leaves no training behind. Its findings: docs/processes.md."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from lingvo_moe.cli import app
from lingvo_moe.errors import UserError
from lingvo_moe.testing import experiments
from lingvo_moe.utils.exit_status import INTERRUPTED
from tools import launcher_check


def test_mistakes_are_reported_before_anything_is_started(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(launcher_check.shutil, "which", lambda name: None if name == "srun" else name)
    (tmp_path / "old").write_text("")
    new = f"--directory={tmp_path / 'new'}"
    for arguments, message in (
        ([f"--directory={tmp_path}"], "is not empty; name a new directory"),
        ([f"--directory={tmp_path / 'old'}"], "old is not a directory; expected the name of a directory"),
        ([new, "--launchers=srnu"], "--launchers=srnu: srnu chooses none of the 3 names. Did you mean srun"),
        ([new, "--launchers=srun,flags"], "--launchers=srun is not installed here"),
        ([new, "--launchers="], "--launchers= is empty; expected some of srun, mpirun, flags"),
        ([new, "--launchers=flags,"], "--launchers=flags,: an item is empty"),
    ):
        assert app.execute(launcher_check.main, ["launcher_check", *arguments], launcher_check._VALUES) == 2
        assert message in capsys.readouterr().err


def test_launchers_that_are_not_installed_are_named_and_left_out(tmp_path, monkeypatch, capsys):
    """By default; the check says so, and does not stop."""
    checked = []
    monkeypatch.setattr(launcher_check.shutil, "which", lambda name: None if name == "srun" else name)
    monkeypatch.setattr(experiments, "make_data", lambda directory: None)
    monkeypatch.setattr(
        launcher_check, "_check_all", lambda launchers, data, directory: checked.extend(launchers) or []
    )
    arguments = ["launcher_check", f"--directory={tmp_path / 'new'}"]
    assert app.execute(launcher_check.main, arguments, launcher_check._VALUES) == 0
    assert checked == ["mpirun", "flags"] and "srun    is not installed here" in capsys.readouterr().out


# A launcher whose process is in another process group, as those of all launchers are.
_LAUNCHER = """
import subprocess, sys
code = "import time; time.sleep(60)"
sys.exit(subprocess.Popen([sys.executable, "-c", code, "train", "--index=1", *sys.argv[1:]], process_group=0).wait())
"""


@pytest.fixture
def data(tmp_path) -> experiments.Data:
    return experiments.Data(tmp_path, tmp_path)


@pytest.fixture
def job(data, tmp_path, monkeypatch) -> launcher_check._Job:
    monkeypatch.setattr(launcher_check, "_TRAIN", ())
    monkeypatch.setitem(launcher_check._LAUNCH, "own", (sys.executable, "-c", _LAUNCHER))
    monkeypatch.setitem(launcher_check._INDEX, "own", "--index=1")
    return launcher_check._Job("own", data, tmp_path)


def _await_processes(job: launcher_check._Job, count: int):
    deadline = time.monotonic() + 20
    # While a process becomes another program, it has no command line, and does not count for a moment.
    while len(found := job.processes()) != count and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(found) == count


def test_no_training_is_left_after_an_error(job):
    """Neither the launcher nor what it has started: they would train a million steps."""
    with pytest.raises(ZeroDivisionError), job.start(10**6):
        _await_processes(job, 2)
        raise ZeroDivisionError
    assert not job.processes()


def test_no_training_is_left_after_sigterm(job, tmp_path, monkeypatch, capsys):
    """As after Ctrl-C."""

    def train(launchers, data, directory):
        with job.start(10**6):
            _await_processes(job, 2)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(20)

    monkeypatch.setattr(experiments, "make_data", lambda directory: None)
    monkeypatch.setattr(launcher_check, "_check_all", train)
    arguments = ["launcher_check", f"--directory={tmp_path / 'new'}", "--launchers=flags"]
    assert app.execute(launcher_check.main, arguments, launcher_check._VALUES) == INTERRUPTED
    assert capsys.readouterr().err == "interrupted\n" and not job.processes()


def test_what_does_not_end_and_what_is_not_there_are_errors(job, monkeypatch):
    """Not a traceback. A process that is there gets the signal, and the launcher passes its status on."""
    with job.start(10**6) as running:
        _await_processes(job, 2)
        monkeypatch.setattr(launcher_check, "_SECONDS", 0.1)
        with pytest.raises(UserError, match="own: training has not ended after 0.1 s; see .*own.log"):
            launcher_check._wait(job, running)
        monkeypatch.setattr(launcher_check, "_SECONDS", 20.0)
        monkeypatch.setitem(launcher_check._INDEX, "own", "--index=2")
        with pytest.raises(UserError, match="own: there is no process with --index=2; see .*own.log"):
            job.signal_process_1(signal.SIGTERM)
        monkeypatch.setitem(launcher_check._INDEX, "own", "--index=1")
        job.signal_process_1(signal.SIGTERM)
        assert launcher_check._wait(job, running) != 0


def test_a_failed_run_to_compare_with_is_an_error(data, tmp_path, monkeypatch, capsys):
    """Its losses would be missing."""
    monkeypatch.setattr(experiments, "make_data", lambda directory: directory.mkdir(parents=True) or data)
    monkeypatch.setattr(launcher_check, "_TRAIN", (sys.executable, "-c", "raise SystemExit(3)"))
    arguments = ["launcher_check", f"--directory={tmp_path / 'new'}", "--launchers=flags"]
    assert app.execute(launcher_check.main, arguments, launcher_check._VALUES) == 2
    assert "to compare with, ended with status 3; see " in capsys.readouterr().err
