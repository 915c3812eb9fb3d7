"""Protects output files: an unwritable path is an error before any work, and a file is never left half written."""

from __future__ import annotations

import errno
import json
import math
import os
import stat

import numpy as np
import pytest
from safetensors import numpy

from lingvo_moe.errors import UserError
from lingvo_moe.utils import output_files


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{tmp}", "is a directory"),
        ("", ": expected the name of a file"),
        ("{tmp}/" + 250 * "a", "cannot be written to .File name too long.; name another file"),
        ("{tmp}/no/file", "there is no directory {tmp}/no; create it first"),
        (os.devnull, "is not a file but a device or a pipe"),
        ("{tmp}/pipe", "is not a file but a device or a pipe"),
    ],
)
def test_unwritable_path_is_refused(tmp_path, path, message):
    """Devices above all: a privileged user would replace one by a file, for every program on the machine."""
    os.mkfifo(tmp_path / "pipe")
    path = path.format(tmp=tmp_path)
    with pytest.raises(UserError, match=f"--output(={path})?.*{message.format(tmp=tmp_path)}"):
        output_files.check_path("--output", path)


def test_writable_paths_are_accepted(tmp_path):
    """No path, standard output, a new file, and a file to be replaced."""
    (tmp_path / "old.txt").write_text("old")
    for path in (None, "-", f"{tmp_path}/new.txt", f"{tmp_path}/old.txt"):
        output_files.check_path("--output", path)


def test_what_is_no_text_is_not_for_standard_output(tmp_path, monkeypatch):
    """It was written to a file of the name `-`."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="--output=-: only text is written to standard output"):
        output_files.check_path("--output", "-", is_text=False)
    output_files.check_path("--output", "./-", is_text=False)


@pytest.mark.parametrize("other", ["{tmp}/./file", "{tmp}//file", "{tmp}/link"])
def test_two_flags_do_not_name_one_file(tmp_path, other):
    """The second would replace what the first wrote, or what was read."""
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(UserError, match="--b=.*: expected the name of a file of its own, beside --a"):
        output_files.check_own_paths({"--b": other.format(tmp=tmp_path)}, {"--a": f"{tmp_path}/file"})
    with pytest.raises(UserError, match="--c=.*: expected the name of a file of its own, beside --b"):
        output_files.check_own_paths({"--b": f"{tmp_path}/new", "--c": f"{tmp_path}/./new"}, {"--a": None})
    with pytest.raises(UserError, match="--b=-: expected the name of a file of its own, beside standard output"):
        output_files.check_own_paths({"--b": "-"}, {"--a": "-"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def test_file_is_replaced_completely_or_not_at_all(tmp_path, capsys):
    """An error in the middle leaves the old file and nothing beside it."""
    path = tmp_path / "out.txt"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), output_files.atomic_writer(str(path)) as file:
        file.write("half")
        raise ZeroDivisionError
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["out.txt"]
    with output_files.atomic_writer(str(path)) as file:
        file.write("new")
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["out.txt"]
    with output_files.atomic_writer("-") as file:
        file.write("shown")
    print("table", file=output_files.table_stream("-"))
    print("table", file=output_files.table_stream("file"))
    assert capsys.readouterr() == ("showntable\n", "table\n")


def test_the_target_of_a_link_is_replaced_and_permissions_stay(tmp_path):
    """As any program does that opens the file to write; a link may lead to a file that is not there yet."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "file")
    for text in ("first", "second"):
        with output_files.atomic_writer(str(tmp_path / "link")) as file:
            file.write(text)
        assert (tmp_path / "link").is_symlink() and (tmp_path / "elsewhere" / "file").read_text() == text
        (tmp_path / "elsewhere" / "file").chmod(0o600)
    assert stat.S_IMODE((tmp_path / "link").stat().st_mode) == 0o600
    assert os.listdir(tmp_path / "elsewhere") == ["file"]


def test_an_error_of_a_write_names_the_file(tmp_path):
    """`export --output=program.zip` on a full disk; an error of something else is left alone."""
    for number, named in ((errno.ENOSPC, True), (errno.EIO, True), (errno.ECONNRESET, False)):
        with pytest.raises(OSError) as raised, output_files.atomic_path(tmp_path / "out.zip"):
            raise OSError(number, os.strerror(number))
        assert raised.value.filename == (str(tmp_path / "out.zip") if named else None)


def test_file_of_a_library_has_the_permissions_of_a_new_file(tmp_path):
    """Others may read a released model: safetensors writes files for their owner alone."""
    (tmp_path / "new").touch()
    with output_files.atomic_path(tmp_path / "out.safetensors") as partial:
        numpy.save_file({"a": np.zeros(3, np.float32)}, partial)
    assert (tmp_path / "out.safetensors").stat().st_mode == (tmp_path / "new").stat().st_mode
    assert list(numpy.load_file(tmp_path / "out.safetensors")["a"]) == [0, 0, 0]


def test_a_file_inside_of_a_directory_that_is_read_is_an_error(tmp_path, monkeypatch):
    """It would replace what is read, whatever name it has."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "corpus")
    for path in ("corpus/test/de.tsv", "link/new", "other/../corpus/x", "corpus"):
        with pytest.raises(UserError, match="--translations=.* is inside of --corpus=corpus, which is read"):
            output_files.check_outside({"--json": None, "--translations": path}, "--corpus", "corpus")
    output_files.check_outside({"--json": "-", "--translations": "corpus.tsv"}, "--corpus", "corpus")


def test_json_has_no_numbers_that_are_not_finite():
    """Python writes and reads `Infinity`, which other programs refuse."""
    value = output_files.as_json({"a": [1.5, {"b": (math.inf, -math.inf, 2)}], "c": math.nan, "d": None, "e": "text"})
    assert value == {"a": [1.5, {"b": ["inf", "-inf", 2]}], "c": "nan", "d": None, "e": "text"}
    json.dumps(value, allow_nan=False)
