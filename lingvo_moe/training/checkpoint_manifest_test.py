"""The manifest: every change of a listed file is found and named, and a manifest that was altered is not used."""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lingvo_moe.errors import UserError
from lingvo_moe.testing.checkpoints import flip, save, truncate
from lingvo_moe.training import checkpoint_manifest
from lingvo_moe.training.checkpoint_errors import CorruptCheckpoint


@pytest.fixture(scope="module")
def step(tmp_path_factory) -> pathlib.Path:
    """The directory of a checkpoint; every test leaves it as it was."""
    logdir = tmp_path_factory.mktemp("log")
    save(logdir, 8)
    return logdir / "checkpoints" / "8"


def files(directory: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def problems(directory: pathlib.Path, items: list[str] | None = None, hashes: bool = True) -> list[str]:
    """Returns the problems of a checkpoint that has a manifest."""
    found = checkpoint_manifest.problems(directory, items, hashes)
    assert found is not None
    return found


def rewrite(directory: pathlib.Path, **changes):
    """Changes entries of the manifest, and its digest to match."""
    content = json.loads((directory / checkpoint_manifest.MANIFEST).read_text()) | changes
    del content["sha256"]
    content["sha256"] = checkpoint_manifest._digest(content)
    (directory / checkpoint_manifest.MANIFEST).write_text(json.dumps(content))


def test_a_saved_checkpoint_has_a_manifest(step):
    """Once the save has finished: it lists all other files, with hashes, and the number of arrays."""
    manifest = checkpoint_manifest.load(step)
    assert manifest is not None
    assert (manifest.step, manifest.arrays) == (8, 5)
    assert set(manifest.files) == {path.relative_to(step).as_posix() for path in files(step)} - {
        checkpoint_manifest.MANIFEST
    }
    assert checkpoint_manifest.size(step) == sum(file.size for file in manifest.files.values())
    assert problems(step) == []


def test_a_link_out_of_the_checkpoint_is_no_file_of_it(step, tmp_path):
    """A manifest that listed it would call a checkpoint corrupt that has all of its own files."""
    before, link = checkpoint_manifest.size(step), step / "notes"
    (tmp_path / "notes").write_text("beside it")
    link.symlink_to(tmp_path / "notes")
    try:
        assert checkpoint_manifest.size(step) == before
    finally:
        link.unlink()


@given(data=st.data())
def test_any_flipped_bit_is_found(step, data):
    """In any file, the manifest included."""
    path = data.draw(st.sampled_from(files(step)))
    before = path.read_bytes()
    bit = data.draw(st.integers(0, len(before) * 8 - 1))
    try:
        flip(path, bit)
        found = problems(step)
    finally:
        path.write_bytes(before)
    assert len(found) == 1 and found[0].startswith(f"{path.relative_to(step).as_posix()} "), found


@pytest.mark.parametrize("name", [checkpoint_manifest.MANIFEST, "meta"])
@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ENOTCONN])
def test_what_the_system_refuses_is_no_corruption(step, name, number, monkeypatch):
    """A checkpoint that is called corrupt is renamed, and the steps since the one before it are lost."""
    refused = next(path for path in files(step) if name in path.parts)
    opened = open

    def refusing(file, *arguments, **settings):
        if os.fspath(file) == os.fspath(refused):
            raise OSError(number, os.strerror(number), file)
        return opened(file, *arguments, **settings)

    for module in (io, builtins):
        monkeypatch.setattr(module, "open", refusing)
    expected = f"{refused.name}: the checkpoint cannot be read .{os.strerror(number)}.*Run the same command again"
    with pytest.raises(UserError, match=expected) as raised:
        problems(step)
    assert not isinstance(raised.value, CorruptCheckpoint)


@pytest.mark.parametrize(
    "corrupt", [truncate, pathlib.Path.unlink, lambda path: path.write_bytes(path.read_bytes() + b"\0")]
)
def test_sizes_are_compared_without_reading(step, corrupt):
    """A file that was cut, removed or appended to is found by its size."""
    for path in files(step):
        if path.name != checkpoint_manifest.MANIFEST:
            before = path.read_bytes()
            corrupt(path)
            found = problems(step, hashes=False)
            path.write_bytes(before)
            assert len(found) == 1 and found[0].startswith(f"{path.relative_to(step).as_posix()} "), found


def test_only_the_required_items_are_checked(step):
    """Inference needs no optimizer state; files beside the items are always checked."""
    for path, expected in (
        ("rest/_METADATA", {"theta": 0, "rest": 1}),
        ("theta/_METADATA", {"theta": 1, "rest": 0}),
        ("_CHECKPOINT_METADATA", {"theta": 1, "rest": 1}),
    ):
        before = (step / path).read_bytes()
        flip(step / path)
        found = {item: len(problems(step, [item])) for item in expected}
        (step / path).write_bytes(before)
        assert found == expected, path


def test_no_manifest(step):
    """There is nothing to compare with; the same manifest can be written again."""
    before = (step / checkpoint_manifest.MANIFEST).read_bytes()
    (step / checkpoint_manifest.MANIFEST).unlink()
    assert checkpoint_manifest.problems(step) is None
    checkpoint_manifest.write_manifest(step, 5)
    assert (step / checkpoint_manifest.MANIFEST).read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"version": 3}, "has version 3, this program knows 2"),
        ({"step": 4}, "is that of step 4"),
        ({"files": {"../../../secret": {"size": 1, "sha256": ""}}}, "is not as it was written"),
        ({"files": {"/etc/hostname": {"size": 1, "sha256": ""}}}, "is not as it was written"),
        ({"files": 3}, "is not as it was written"),
        ({"more": 3}, "is not as it was written"),
    ],
)
def test_manifest_with_other_entries_is_refused(step, changes, pattern):
    """Of another version or step, with unknown entries, or with paths that lead out of the checkpoint."""
    before = (step / checkpoint_manifest.MANIFEST).read_bytes()
    rewrite(step, **changes)
    found = problems(step)
    (step / checkpoint_manifest.MANIFEST).write_bytes(before)
    assert found == [f"manifest.json {pattern}"]


@given(content=st.one_of(st.binary(max_size=40), st.sampled_from([b"", b"[]", b"{}", b"3", b"[" * 10**5])))
def test_malformed_manifest(step, content):
    """Any bytes in its place are a problem of the checkpoint, not an exception."""
    before = (step / checkpoint_manifest.MANIFEST).read_bytes()
    try:
        (step / checkpoint_manifest.MANIFEST).write_bytes(content)
        assert problems(step) == ["manifest.json is not as it was written"]
    finally:
        (step / checkpoint_manifest.MANIFEST).write_bytes(before)


_NAMES = st.text(max_size=12) | st.sampled_from(
    ["", ".", "..", "C:", "a\\b", "a\0b", "/", "~", "theta", "a" * 300, "\ud800"]
)
_PATHS = st.lists(_NAMES, max_size=4).map("/".join) | st.sampled_from(["/etc/passwd", "../8", "theta/../../4", "C:/x"])


@settings(max_examples=300)
@given(path=_PATHS)
def test_no_path_of_a_manifest_leads_out_of_the_checkpoint(step, path):
    """Whatever a manifest lists, no file outside of its directory is opened; a path that leads there is refused."""
    opened = []
    before = (step / checkpoint_manifest.MANIFEST).read_bytes()
    rewrite(step, files={path: {"size": 0, "sha256": "0"}})
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint_manifest, "file_sha256", lambda file: opened.append(file) or "0")
            found = problems(step)
    finally:
        (step / checkpoint_manifest.MANIFEST).write_bytes(before)
    assert len(found) == 1 and not opened
    inside = pathlib.PurePosixPath(os.path.normpath(f"/step/{path}")).is_relative_to("/step")
    if not inside or path.startswith("/") or {"\\", "\0"}.intersection(path):
        assert found == ["manifest.json is not as it was written"]


@pytest.mark.parametrize("relative", [True, False])
def test_link_out_of_the_checkpoint_is_refused(tmp_path, relative):
    """A file or a directory that was replaced by a link to the same content elsewhere is a problem, and is not read."""
    save(tmp_path, 8)
    directory = tmp_path / "checkpoints" / "8"
    for name in ("meta/metadata", "rest"):
        (directory / name).rename(tmp_path / "moved")
        (directory / name).symlink_to(
            os.path.relpath(tmp_path / "moved", (directory / name).parent) if relative else tmp_path / "moved"
        )
        found = problems(directory)
        assert found and all("is a link to a file outside of the checkpoint" in problem for problem in found)
        assert all(problem.startswith(name) for problem in found)
        (directory / name).unlink()
        (tmp_path / "moved").rename(directory / name)
    (tmp_path / "link").symlink_to(tmp_path / "checkpoints")
    assert problems(tmp_path / "link" / "8") == [], "the checkpoint itself may be behind a link"
