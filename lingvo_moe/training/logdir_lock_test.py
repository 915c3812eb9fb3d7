"""Protects the lock of a log directory: one training at a time, whatever ended the one before."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import subprocess
import sys

import pytest

from lingvo_moe.errors import UserError
from lingvo_moe.training import logdir_lock

# Holds the lock of a directory until it is killed; its first line says that it holds it.
_HOLDER = """
import pathlib, sys, time
from lingvo_moe.training import logdir_lock
with logdir_lock.locked(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_one_process_at_a_time(tmp_path, monkeypatch):
    """A second process is refused; once the first was killed, it succeeds, though the file is still there."""
    monkeypatch.setattr(logdir_lock, "_ENDING_SECONDS", 0)
    holder = subprocess.Popen([sys.executable, "-c", _HOLDER, tmp_path], stdout=subprocess.PIPE)
    with holder:
        assert holder.stdout and holder.stdout.readline() == b"held\n"
        refused = pytest.raises(
            UserError, match=f"--logdir={tmp_path}: another process trains there.*another directory"
        )
        with refused, logdir_lock.locked(tmp_path):
            pass
        monkeypatch.undo()  # of a killed process, the lock is waited for
        holder.send_signal(signal.SIGKILL)
        with logdir_lock.locked(tmp_path):
            assert os.listdir(tmp_path) == ["lock"]
    with logdir_lock.locked(tmp_path):
        pass


def test_a_file_system_without_locks(tmp_path, monkeypatch, caplog):
    """Training continues with a warning, as it has always done there."""

    def refuse(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with caplog.at_level(logging.WARNING), logdir_lock.locked(tmp_path):
        assert f"{tmp_path / 'lock'} cannot be locked (No locks available)" in caplog.text


def test_an_error_while_it_is_held_is_not_taken_for_a_missing_lock(tmp_path, caplog):
    """An OSError of the training itself passes through, and the lock is released."""
    with pytest.raises(OSError, match="of training"), logdir_lock.locked(tmp_path):
        raise OSError("of training")
    with logdir_lock.locked(tmp_path):
        assert not caplog.text
