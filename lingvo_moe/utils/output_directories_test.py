"""A directory is replaced as a whole or not at all, also by a process that is killed."""

from __future__ import annotations

import os
import pathlib

import pytest

from lingvo_moe.errors import UserError
from lingvo_moe.utils import output_directories


class Killed(BaseException):
    """Simulates SIGKILL: nothing can be renamed or deleted after it."""


def only_old(directory: pathlib.Path):
    """Accepts a complete directory alone, as the check of a corpus does."""
    if {path.name for path in directory.iterdir()} != {"a", "b"}:
        raise UserError(f"{directory} has other files")


def make(directory: pathlib.Path, text: str) -> pathlib.Path:
    directory.mkdir(exist_ok=True)
    for name in ("a", "b"):
        (directory / name).write_text(text, encoding="utf-8")
    return directory


def test_a_file_is_no_directory(tmp_path):
    """Neither what is below it; the error names the flag and what was expected."""
    make(tmp_path / "old", "text")
    (tmp_path / "link").symlink_to("nowhere")
    for path in (None, "new", "new/below", "old"):
        output_directories.check_path("--output", path and f"{tmp_path}/{path}")
    for path, message in (
        ("old/a", "is not a"),
        ("old/a/b/c", f"is below {tmp_path}/old/a, which is not a"),
        ("link", ""),
    ):
        with pytest.raises(UserError, match=f"--output={tmp_path}/{path} {message}.*expected the name of a directory"):
            output_directories.check_path("--output", f"{tmp_path}/{path}")
    output_directories.check_empty("--output", f"{tmp_path}/new")
    with pytest.raises(UserError, match=f"--output={tmp_path}/old is not empty; name a new"):
        output_directories.check_empty("--output", f"{tmp_path}/old")


@pytest.mark.parametrize(
    "renames, unlinks, expected", [(0, 0, "old"), (1, 0, "old"), (2, 0, "new"), (3, 0, "new"), (3, 1, "new")]
)
def test_a_process_killed_at_any_step_loses_no_directory(tmp_path, monkeypatch, renames, unlinks, expected):
    """The process is gone after some renames, or after it has deleted a part of the old directory.

    The next run finds the old or the new directory and removes everything else.
    """
    output, left = make(tmp_path / "output", "old"), {"rename": renames, "unlink": unlinks}

    def counted(name, original):
        def call(*arguments, **options):
            left[name] -= 1
            if left[name] < 0:
                raise Killed
            return original(*arguments, **options)

        return call

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(pathlib.Path, "rename", counted("rename", pathlib.Path.rename))
        patched.setattr(os, "unlink", counted("unlink", os.unlink))
        with output_directories.atomic_directory(output, only_old) as complete:
            make(complete, "new")
    for path in tmp_path.glob(".output.partial-*"):
        os.utime(path, (0, 0))
    output_directories.recover("--output", output, only_old)
    only_old(output)
    assert (output / "a").read_text() == expected
    assert [path.name for path in tmp_path.iterdir()] == ["output"]


def test_an_error_leaves_the_old_directory(tmp_path):
    """And nothing beside it."""
    output = make(tmp_path / "output", "old")
    with pytest.raises(ZeroDivisionError), output_directories.atomic_directory(output, only_old) as complete:
        make(complete, "new")
        raise ZeroDivisionError
    assert (output / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["output"]


@pytest.mark.parametrize(
    "output, message",
    [
        ("/", "--directory=/: expected a directory that can be replaced"),
        ("file/below", r"--directory=.*/file/below: cannot be made \(File exists\)"),
        ("file/far/below", r"--directory=.*/far/below: cannot be made \(Not a directory\)"),
    ],
)
def test_where_no_directory_can_be_made_is_known_before_the_work(tmp_path, output, message):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=message):
        output_directories.check("--directory", tmp_path / output)
    output_directories.check("--directory", tmp_path / "new" / "output")
    assert list((tmp_path / "new").iterdir()) == []


def test_what_a_link_names_is_replaced(tmp_path):
    """It may be on another disk; the link stays, also one to a directory that is not there yet."""
    (tmp_path / "disk").mkdir()
    output = tmp_path / "output"
    output.symlink_to("disk/output")
    for text in ("old", "new"):
        output_directories.check("--output", output)
        output_directories.recover("--output", output, only_old)
        with output_directories.atomic_directory(output, only_old) as complete:
            make(complete, text)
        assert output.is_symlink() and (tmp_path / "disk" / "output" / "a").read_text() == text
        assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "b", "disk", "output", "output"]


def test_a_directory_of_other_files_is_kept(tmp_path):
    """It has the name of a temporary one by chance."""
    mine = make(tmp_path / ".output.replaced", "mine")
    (mine / "notes").touch()
    with pytest.raises(UserError, match="other files"):
        output_directories.recover("--output", tmp_path / "output", only_old)
    assert (mine / "a").read_text() == "mine"
