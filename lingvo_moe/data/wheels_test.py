"""Wheels are downloaded once, checked by hash, and nothing but their catalogs, inside the directory, is unpacked."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest

from lingvo_moe.data import wheels
from lingvo_moe.data.sources import sha256
from lingvo_moe.errors import UserError

_NAME = "some-1.0-py3-none-any.whl"


def _wheel(directory: Path, members: dict[str, bytes]) -> wheels.Wheel:
    directory.mkdir(exist_ok=True)
    with zipfile.ZipFile(directory / _NAME, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return wheels.Wheel("some", "1.0", sha256(directory / _NAME))


def _no_pip(monkeypatch, returncode: int = 1):
    def run(command, **options):
        assert "--require-hashes" in command and "--no-deps" in command
        return subprocess.CompletedProcess(command, returncode, "", "ERROR: no network")

    monkeypatch.setattr(wheels.subprocess, "run", run)


def test_an_intact_wheel_is_not_fetched_again_and_only_catalogs_are_unpacked(tmp_path, monkeypatch):
    """A second run, or one without a network, works from what is there."""
    _no_pip(monkeypatch)
    wheel = _wheel(tmp_path, {"some/locale/de/LC_MESSAGES/a.mo": b"x", "some/code.py": b"import os"})
    wheels.fetch(tmp_path, (wheel,))
    files = [path for path in (tmp_path / "some-1.0").rglob("*") if path.is_file()]
    assert [path.name for path in files] == ["a.mo"]


def test_a_damaged_wheel_is_fetched_again_and_a_failure_says_why(tmp_path, monkeypatch):
    """An interrupted download is noticed by its hash; pip's reason is passed on."""
    wheel = _wheel(tmp_path, {"some/locale/de/LC_MESSAGES/a.mo": b"x"})
    (tmp_path / _NAME).write_bytes((tmp_path / _NAME).read_bytes()[:-5])
    _no_pip(monkeypatch)
    with pytest.raises(UserError, match="pip could not download some==1.0: ERROR: no network\nCheck the network"):
        wheels.fetch(tmp_path, (wheel,))


def test_members_that_lead_out_are_refused(tmp_path, monkeypatch):
    """An archive cannot write beside its directory, and leaves nothing half unpacked under its name."""
    _no_pip(monkeypatch)
    wheel = _wheel(tmp_path / "packages", {"../../out.mo": b"x"})
    with pytest.raises(UserError, match="leads out of the archive"):
        wheels.fetch(tmp_path / "packages", (wheel,))
    assert not (tmp_path / "out.mo").exists() and not (tmp_path / "packages" / "some-1.0").exists()


def test_an_unpacking_that_was_interrupted_is_done_again(tmp_path, monkeypatch):
    """Leftovers of a killed run do not end up in a corpus."""
    _no_pip(monkeypatch)
    wheel = _wheel(tmp_path, {"some/locale/de/LC_MESSAGES/a.mo": b"x"})
    leftover = tmp_path / "some-1.0.partial" / "old.mo"
    leftover.parent.mkdir()
    leftover.write_bytes(b"y")
    wheels.fetch(tmp_path, (wheel,))
    assert not list(tmp_path.rglob("old.mo"))
