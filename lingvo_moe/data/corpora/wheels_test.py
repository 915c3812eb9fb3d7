"""Protects the catalogs of wheels: they are downloaded once, checked by hash, and unpacked safely."""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from lingvo_moe.data.corpora import wheels
from lingvo_moe.data.corpora.catalogs import Entry
from lingvo_moe.data.corpora.sources import EntrySource, SourceList
from lingvo_moe.errors import UserError
from lingvo_moe.utils.hashes import file_sha256

_NAME = "some-1.0-py3-none-any.whl"


def _wheel(directory: Path, members: dict[str, bytes]) -> wheels.Wheel:
    directory.mkdir(exist_ok=True)
    with zipfile.ZipFile(directory / _NAME, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return wheels.Wheel("some", "1.0", file_sha256(directory / _NAME))


def _no_pip(monkeypatch, returncode: int = 1):
    def run(command, **options):
        assert "--require-hashes" in command and "--no-deps" in command
        return subprocess.CompletedProcess(command, returncode, "", "ERROR: no network")

    monkeypatch.setattr(subprocess, "run", run)


def test_intact_wheel_is_not_downloaded_again_and_only_catalogs_are_unpacked(tmp_path, monkeypatch):
    """A second run, or one without a network, uses the cache."""
    _no_pip(monkeypatch)
    wheel = _wheel(tmp_path, {"some/locale/de/LC_MESSAGES/a.mo": b"x", "some/code.py": b"import os"})
    wheels.fetch(tmp_path, (wheel,))
    (unpacked,) = filter(Path.is_dir, tmp_path.iterdir())
    assert [path.name for path in unpacked.rglob("*") if path.is_file()] == ["a.mo"]


def test_other_rules_unpack_again(tmp_path, monkeypatch):
    """A directory of an older release, which read other catalogs of the same wheel, is not used."""
    _no_pip(monkeypatch)
    wheel = _wheel(tmp_path, {"some/de.mo": b"x", "some/de.json": b"yz"})
    assert [source.size for source in wheels.fetch(tmp_path, (wheel,))] == [1]
    assert [source.size for source in wheels.fetch(tmp_path, (wheel._replace(suffix=".json"),))] == [2]


def test_corrupt_wheel_is_downloaded_again_and_a_failure_has_the_reason(tmp_path, monkeypatch):
    """The hash detects an interrupted download; pip's reason is in the error."""
    wheel = _wheel(tmp_path, {"some/locale/de/LC_MESSAGES/a.mo": b"x"})
    (tmp_path / _NAME).write_bytes((tmp_path / _NAME).read_bytes()[:-5])
    _no_pip(monkeypatch)
    with pytest.raises(UserError, match="pip could not download some==1.0: ERROR: no network\nCheck the network"):
        wheels.fetch(tmp_path, (wheel,))


@pytest.mark.parametrize("member", ["../../out.mo", "/tmp/out.mo", "a/../../out.mo", "c:/out.mo", "a\\..\\out.mo"])
def test_members_outside_of_the_archive_are_refused(tmp_path, monkeypatch, member):
    """An archive cannot write outside of its directory, and leaves no partial directory under its final name."""
    _no_pip(monkeypatch)
    wheel = _wheel(tmp_path / "packages", {member: b"x"})
    with pytest.raises(UserError, match="some-1.0-py3-none-any.whl, archive member: the path .* is refused"):
        wheels.fetch(tmp_path / "packages", (wheel,))
    assert not list(tmp_path.rglob("out.mo")) and not list(filter(Path.is_dir, (tmp_path / "packages").iterdir()))


def test_interrupted_unpacking_is_repeated(tmp_path, monkeypatch):
    """Leftovers of a killed run do not get into a corpus, nor stay in the cache."""
    _no_pip(monkeypatch)
    wheel = _wheel(tmp_path, {"some/locale/de/LC_MESSAGES/a.mo": b"x"})
    wheels.fetch(tmp_path, (wheel,))
    (unpacked,) = filter(Path.is_dir, tmp_path.iterdir())
    shutil.rmtree(unpacked)
    leftover = tmp_path / f"{unpacked.name}.partial-x"
    (leftover / "contents").mkdir(parents=True)
    (leftover / "contents" / "old.mo").write_bytes(b"y")
    (leftover / "lock").touch()
    os.utime(leftover, (0, 0))
    (source,) = wheels.fetch(tmp_path, (wheel,))
    assert source.size == 1 and not list(tmp_path.rglob("old.mo"))


def test_unseen_packages_are_a_game_and_a_home_automation(tmp_path, monkeypatch):
    """A Debian package and a wheel of JSON catalogs; of the wheel, only the selected languages are read."""
    wheel = _wheel(
        tmp_path,
        {
            f"some/translations/{language}.json": b'{"a": {"b": "%s"}}' % language.encode()
            for language in ("en", "de", "fr")
        },
    )
    monkeypatch.setattr(wheels, "HOME_ASSISTANT", wheel._replace(suffix=".json"))
    game, asked = EntrySource("game", [Entry("de", "city", "Stadt")]), []
    monkeypatch.setattr(wheels.debian, "fetch", lambda *arguments: asked.append(arguments) or SourceList([game], ["x"]))
    fetched = wheels.unseen_preset(tmp_path, ("de",))
    assert asked == [(tmp_path, ["freeciv-data"], ("de",))] and fetched.missing_packages == ["x"]
    entries = [entry for source in fetched.sources for file in source.files() for entry in file.entries]
    assert entries == [Entry("de", "city", "Stadt"), Entry("de", "en", "de")]
