"""Protects the machine from names in a manifest or an archive: what is accepted stays inside of its directory."""

from __future__ import annotations

import os
import re
from pathlib import PurePosixPath

import pytest
from hypothesis import example, given, strategies

from lingvo_moe.errors import UserError
from lingvo_moe.utils import safe_paths

_COMPONENTS = strategies.sampled_from(["a", "b.tsv", "..", ".", "", "c:", "de\\f", "\0", "~", "x" * 300, "é"])
_PATHS = strategies.lists(_COMPONENTS, max_size=5).map("/".join) | strategies.text(max_size=20)


@given(_PATHS)
@example("a/../../b")
@example("/etc/passwd")
@example("C:/x")
@example("a//b")
def test_accepted_path_stays_inside_its_directory(path):
    """Property: a path is refused with an error that names the manifest and the value, or it stays below the root."""
    try:
        accepted = safe_paths.check_relative_path(path, "corpus.json, field file")
    except UserError as error:
        assert str(error).startswith("corpus.json, field file: ") and repr(path) in str(error)
        return
    joined = os.path.normpath(os.path.join("/archive/directory", accepted))
    assert joined.startswith("/archive/directory/") and joined == f"/archive/directory/{path}"
    assert not set(path) & {"\\", "\0"} and not re.match("[A-Za-z]:", path)


@given(_PATHS)
def test_accepted_file_name_is_one_component(path):
    """Property: a file name never contains a directory."""
    try:
        name = safe_paths.check_file_name(path, "tokenizer.json")
    except UserError:
        return
    assert name == path and "/" not in name and name not in ("", ".", "..")


@given(strategies.none() | strategies.integers() | strategies.lists(strategies.text()) | strategies.booleans())
def test_value_that_is_not_a_string_is_refused(value):
    """A JSON manifest may have any type where a name is expected."""
    with pytest.raises(UserError, match="corpus.json: .* is not a path; expected a string"):
        safe_paths.check_relative_path(value, "corpus.json")


@pytest.mark.parametrize(
    "path, reason",
    [
        ("/etc/passwd", "it is absolute"),
        ("../x", "it has the component '..'"),
        ("a/./b", "it has the component '.'"),
        ("a//b", "it has the component ''"),
        ("", "it has the component ''"),
        ("a\\b", "it has a backslash"),
        ("C:x", "it has a drive letter"),
        ("a\0b", "it has a control character"),
        ("x" * 256, "a component is longer than 255 bytes"),
    ],
)
def test_refused_path_is_named_with_the_reason(path, reason):
    """The error has the file, the value and the reason."""
    with pytest.raises(UserError, match=f"m.json: the path .* is refused: {re.escape(reason)}"):
        safe_paths.check_relative_path(path, "m.json")


def test_ordinary_paths_are_accepted():
    """Names as in real manifests and wheels."""
    assert safe_paths.check_relative_path("train/pt_BR.tsv", "m") == PurePosixPath("train/pt_BR.tsv")
    assert safe_paths.check_file_name("source.model", "m") == "source.model"
    assert safe_paths.check_relative_path("some/locale/ca@valencia/LC_MESSAGES/a.mo", "m").name == "a.mo"
    with pytest.raises(UserError, match="is not a plain file name"):
        safe_paths.check_file_name("train/de.tsv", "m")
