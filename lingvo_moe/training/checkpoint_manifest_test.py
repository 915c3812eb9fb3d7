"""A manifest notices every change of every file, and names the file; it never trusts a changed manifest."""

from __future__ import annotations

import json
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lingvo_moe.testing.checkpoints import flip, save, truncate
from lingvo_moe.training import checkpoint_manifest


@pytest.fixture(scope="module")
def sealed(tmp_path_factory) -> pathlib.Path:
    """The directory of a step; every test leaves it as it was."""
    logdir = tmp_path_factory.mktemp("log")
    save(logdir, 8)
    return logdir / "checkpoints" / "8"


def files(directory: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def rewrite(directory: pathlib.Path, **changes):
    """Another manifest, with a digest that fits it."""
    content = json.loads((directory / checkpoint_manifest.MANIFEST).read_text()) | changes
    del content["sha256"]
    content["sha256"] = checkpoint_manifest._digest(content)
    (directory / checkpoint_manifest.MANIFEST).write_text(json.dumps(content))


def test_a_saved_checkpoint_is_sealed(sealed):
    """By the time that the save is over; all files but the manifest are in it, and all arrays are counted."""
    manifest = checkpoint_manifest.load(sealed)
    assert (manifest.step, manifest.arrays) == (8, 5)
    assert set(manifest.files) == {path.relative_to(sealed).as_posix() for path in files(sealed)} - {
        checkpoint_manifest.MANIFEST
    }
    assert checkpoint_manifest.size(sealed) == sum(file.size for file in manifest.files.values())
    assert checkpoint_manifest.problems(sealed) == []


@given(data=st.data())
def test_any_bit_of_any_file_counts(sealed, data):
    """The manifest's own included, where no bit is white space."""
    path = data.draw(st.sampled_from(files(sealed)))
    before = path.read_bytes()
    bit = data.draw(st.integers(0, len(before) * 8 - 1))
    try:
        flip(path, bit)
        found = checkpoint_manifest.problems(sealed)
    finally:
        path.write_bytes(before)
    assert len(found) == 1 and found[0].startswith(f"{path.relative_to(sealed).as_posix()} "), found


@pytest.mark.parametrize(
    "damage", [truncate, pathlib.Path.unlink, lambda path: path.write_bytes(path.read_bytes() + b"\0")]
)
def test_any_file_of_another_size_counts_without_reading_it(sealed, damage):
    for path in files(sealed):
        if path.name != checkpoint_manifest.MANIFEST:
            before = path.read_bytes()
            damage(path)
            found = checkpoint_manifest.problems(sealed, hashes=False)
            path.write_bytes(before)
            assert len(found) == 1 and found[0].startswith(f"{path.relative_to(sealed).as_posix()} "), found


def test_only_the_items_that_matter_are_checked(sealed):
    """Those who read weights alone need no optimizer_state; the files beside the items matter to all."""
    for path, expected in (
        ("rest/_METADATA", {"theta": 0, "rest": 1}),
        ("theta/_METADATA", {"theta": 1, "rest": 0}),
        ("_CHECKPOINT_METADATA", {"theta": 1, "rest": 1}),
    ):
        before = (sealed / path).read_bytes()
        flip(sealed / path)
        found = {item: len(checkpoint_manifest.problems(sealed, [item])) for item in expected}
        (sealed / path).write_bytes(before)
        assert found == expected, path


def test_without_a_manifest_there_is_no_answer(sealed):
    before = (sealed / checkpoint_manifest.MANIFEST).read_bytes()
    (sealed / checkpoint_manifest.MANIFEST).unlink()
    assert checkpoint_manifest.problems(sealed) is None
    checkpoint_manifest.write_manifest(sealed, 5)
    assert (sealed / checkpoint_manifest.MANIFEST).read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": 2}, "has version 2, this program knows 1"),
        ({"step": 4}, "is that of step 4"),
        ({"files": {"../../../secret": {"size": 1, "sha256": ""}}}, "is not as it was written"),
        ({"files": {"/etc/hostname": {"size": 1, "sha256": ""}}}, "is not as it was written"),
        ({"files": 3}, "is not as it was written"),
        ({"more": 3}, "is not as it was written"),
    ],
)
def test_a_manifest_of_something_else_is_refused(sealed, changes, said):
    """Nor is any file outside of the checkpoint read on its behalf."""
    before = (sealed / checkpoint_manifest.MANIFEST).read_bytes()
    rewrite(sealed, **changes)
    found = checkpoint_manifest.problems(sealed)
    (sealed / checkpoint_manifest.MANIFEST).write_bytes(before)
    assert found == [f"manifest.json {said}"]


@given(content=st.one_of(st.binary(max_size=40), st.sampled_from([b"", b"[]", b"{}", b"3", b"[" * 10**5])))
def test_what_is_no_manifest_is_damage_and_no_error_of_ours(sealed, content):
    before = (sealed / checkpoint_manifest.MANIFEST).read_bytes()
    try:
        (sealed / checkpoint_manifest.MANIFEST).write_bytes(content)
        assert checkpoint_manifest.problems(sealed) == ["manifest.json is not as it was written"]
    finally:
        (sealed / checkpoint_manifest.MANIFEST).write_bytes(before)
