"""Protects temporary directories: none is shared by two processes, and a killed one's does not stay for ever."""

from __future__ import annotations

import fcntl
import os
import tempfile

import pytest

from lingvo_moe.utils import temporary_directories


def test_a_directory_is_empty_and_removed_at_the_end(tmp_path):
    """Also after an error, and two at once are different ones."""
    with (
        pytest.raises(ZeroDivisionError),
        temporary_directories.make("a-", tmp_path) as first,
        temporary_directories.make("a-", tmp_path) as second,
    ):
        assert first != second and not any(first.iterdir()) and first.is_relative_to(tmp_path)
        (first / "file").touch()
        raise ZeroDivisionError
    assert not any(tmp_path.iterdir())


def test_a_directory_may_be_renamed(tmp_path):
    """It stays, with the permissions of any new directory: others may read a corpus."""
    (tmp_path / "new").mkdir()
    with temporary_directories.make(".b.partial-", tmp_path) as directory:
        (directory / "file").touch()
        directory.rename(tmp_path / "b")
    assert {path.name for path in tmp_path.iterdir()} == {"b", "new"} and (tmp_path / "b" / "file").exists()
    assert (tmp_path / "b").stat().st_mode == (tmp_path / "new").stat().st_mode


def test_directories_of_killed_processes_are_removed(tmp_path, monkeypatch):
    """Those of processes that run are kept, those of other prefixes, and directories that are none of ours."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("[a]-killed", "[a]-running", "[a]-new", "[a]-other", "a-mine"):
        (tmp_path / name / "contents").mkdir(parents=True)
        if name != "[a]-other":
            (tmp_path / name / "lock").touch()
        if name != "[a]-new":
            os.utime(tmp_path / name, (0, 0))
    with open(tmp_path / "[a]-running" / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with temporary_directories.make("[a]-"):
            pass
    assert {path.name for path in tmp_path.iterdir()} == {"[a]-running", "[a]-new", "[a]-other", "a-mine"}
