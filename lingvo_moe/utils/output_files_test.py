"""A place that cannot be written to is told before any work; a file is there whole or not at all."""

from __future__ import annotations

import os

import pytest

from lingvo_moe.errors import UserError
from lingvo_moe.utils import output_files


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("{tmp}", "is a directory"),
        ("{tmp}/no/file", "there is no directory {tmp}/no; make it first"),
        (os.devnull, "is no file but a device or a pipe"),
        ("{tmp}/pipe", "is no file but a device or a pipe"),
    ],
)
def test_places_that_are_none(tmp_path, path, said):
    """A device above all: whoever may would put a file in its place, for every program on the machine."""
    os.mkfifo(tmp_path / "pipe")
    path = path.format(tmp=tmp_path)
    with pytest.raises(UserError, match=f"--output={path}.*{said.format(tmp=tmp_path)}"):
        output_files.check_place("--output", path)


def test_places_that_will_do(tmp_path):
    """Nothing given, standard output, a new file, one to be replaced."""
    (tmp_path / "old.txt").write_text("old")
    for path in (None, "-", f"{tmp_path}/new.txt", f"{tmp_path}/old.txt"):
        output_files.check_place("--output", path)


def test_a_file_is_whole_or_as_it_was(tmp_path, capsys):
    """Also where an error comes in the middle."""
    path = tmp_path / "out.txt"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), output_files.writing(str(path)) as file:
        file.write("half")
        1 // 0
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["out.txt"]
    with output_files.writing(str(path)) as file:
        file.write("new")
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["out.txt"]
    with output_files.writing("-") as file:
        file.write("shown")
    assert capsys.readouterr().out == "shown"
