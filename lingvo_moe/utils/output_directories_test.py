"""A directory is replaced as a whole or not at all, also by a process that is killed."""

from __future__ import annotations

import pathlib

import pytest

from lingvo_moe.errors import UserError
from lingvo_moe.utils import output_directories


class Killed(BaseException):
    """Simulates SIGKILL: nothing is cleaned up after it."""


def anything(directory: pathlib.Path):
    assert directory.is_dir()


def make(directory: pathlib.Path, text: str) -> pathlib.Path:
    directory.mkdir()
    (directory / "file").write_text(text, encoding="utf-8")
    return directory


@pytest.mark.parametrize("renames, expected", [(0, "old"), (1, "old"), (2, "new")])
def test_a_process_killed_at_any_step_loses_no_directory(tmp_path, monkeypatch, renames, expected):
    """After `renames` renames the process is gone; the next run has the old or the new directory, and nothing else."""
    output, complete = make(tmp_path / "output", "old"), make(tmp_path / "complete", "new")
    rename, made = pathlib.Path.rename, []

    def die(self, target):
        made.append(target)
        if len(made) > renames:
            raise Killed
        return rename(self, target)

    def die_before_deleting(*_):
        raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(pathlib.Path, "rename", die)
        patched.setattr("shutil.rmtree", die_before_deleting)
        output_directories.replace(output, complete, anything)
    output_directories.recover(output, anything)
    assert (output / "file").read_text() == expected
    assert {path.name for path in tmp_path.iterdir()} <= {"output", "complete"}


def test_an_error_leaves_the_old_directory(tmp_path):
    """The new one is not there."""
    output = make(tmp_path / "output", "old")
    with pytest.raises(FileNotFoundError):
        output_directories.replace(output, tmp_path / "missing", anything)
    assert (output / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["output"]


def test_a_directory_of_other_files_is_kept(tmp_path):
    """It has the name of a temporary one by chance."""

    def refuse(directory):
        raise UserError(f"{directory} has other files")

    mine = make(tmp_path / ".output.replaced", "mine")
    with pytest.raises(UserError, match="other files"):
        output_directories.recover(tmp_path / "output", refuse)
    assert (mine / "file").read_text() == "mine"
