"""Protects locks on files: one process at a time, and the commands that it has started."""

from __future__ import annotations

import errno
import fcntl
import os
import pathlib
import subprocess
import sys

import pytest

from lingvo_moe.utils import file_lock

_REPOSITORY = pathlib.Path(__file__).parents[2]
# Waits for the lock file that is its argument.
_WAITER = """
import logging, pathlib, sys
from lingvo_moe.utils import file_lock
logging.basicConfig(level="INFO")
with file_lock.locked(pathlib.Path(sys.argv[1])): pass
"""


def test_a_command_holds_a_lock_after_its_parent_has_ended(tmp_path):
    """It has inherited the descriptor, for which the next process waits, and says so."""
    path = tmp_path / "lock"
    code = "import sys; print('ready', flush=True); sys.stdin.read()"
    with file_lock.locked(path) as held:
        command = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=[held], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert command.stdin and command.stdout and command.stdout.readline() == b"ready\n"
    environment = {**os.environ, "PYTHONPATH": str(_REPOSITORY)}
    waiter = subprocess.Popen([sys.executable, "-c", _WAITER, path], stderr=subprocess.PIPE, env=environment)
    expected = f"waiting for another process that works in {tmp_path} ..."
    assert waiter.stderr and expected in waiter.stderr.readline().decode() and waiter.poll() is None
    command.communicate()
    assert waiter.wait() == 0
    waiter.stderr.close()


def test_without_waiting_a_held_file_is_an_error(tmp_path):
    """The file stays as it is, and can be locked later."""
    path = tmp_path / "lock"
    path.write_text("content")
    with file_lock.locked(path), pytest.raises(BlockingIOError), file_lock.locked(path, waits=False):
        pass
    with file_lock.locked(path, waits=False):
        assert path.read_text() == "content"


def test_a_file_system_without_locks(tmp_path, monkeypatch, caplog):
    """The work is done, with a warning."""

    def refuse(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with file_lock.locked(tmp_path / "lock", waits=False):
        assert f"{tmp_path / 'lock'} cannot be locked (No locks available)" in caplog.text
