"""Protects downloads pinned by hash, and directories that are complete or absent, with other processes beside."""

from __future__ import annotations

import sys

import pytest

from lingvo_moe.data.corpora import pinned
from lingvo_moe.errors import UserError
from lingvo_moe.utils.hashes import sha256

_ARCHIVE = pinned.PinnedArchive("some==1.0", "some-1.0-*.whl", sha256(b"content"))


def _writes(content: str):
    def command(directory):
        return [sys.executable, "-c", f"open({str(directory / 'some-1.0-any.whl')!r}, 'w').write({content!r})"]

    return command


def test_archive_is_downloaded_once(tmp_path):
    """The second call uses the cache; a file with another content is replaced."""
    path = pinned.fetch(tmp_path, _ARCHIVE, _writes("content"))
    assert path == tmp_path / "some-1.0-any.whl" == pinned.fetch(tmp_path, _ARCHIVE, _writes("other"))
    path.write_text("corrupt")
    assert pinned.fetch(tmp_path, _ARCHIVE, _writes("content")).read_text() == "content"
    assert [path.name for path in tmp_path.iterdir()] == ["some-1.0-any.whl"]


@pytest.mark.parametrize(
    "code, message",
    [
        (
            "raise SystemExit('ERROR: no network\\nERROR: no match')",
            "could not download some==1.0: ERROR: no network\n",
        ),
        ("raise SystemExit(3)", "could not download some==1.0: exit status 3\n"),
        ("pass", "could not download some==1.0: exit status 0\n"),
    ],
)
def test_failure_has_the_reason(tmp_path, code, message):
    """The package manager's first error, and what to do."""
    with pytest.raises(UserError, match=f"{message}Check the network"):
        pinned.fetch(tmp_path, _ARCHIVE, lambda directory: [sys.executable, "-c", code])


def test_other_content_is_an_error(tmp_path):
    """A registry cannot replace an archive."""
    with pytest.raises(UserError, match="with another content than expected .*Check which registry"):
        pinned.fetch(tmp_path, _ARCHIVE, _writes("other"))
    assert list(tmp_path.iterdir()) == []


def test_directory_is_filled_once_and_completely(tmp_path):
    """An interrupted call leaves none, and the next one starts with an empty directory."""

    def interrupted(directory):
        (directory / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pinned.complete_directory(tmp_path / "cache" / "a", interrupted)
    for name in ("whole", "never"):
        pinned.complete_directory(tmp_path / "cache" / "a", lambda directory, name=name: (directory / name).touch())
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "cache", "whole"]


def test_another_process_may_complete_the_directory_first(tmp_path):
    """Its directory stays; this process discards its own."""

    def fill(directory):
        (directory / "own").touch()
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "first").touch()

    assert [path.name for path in pinned.complete_directory(tmp_path / "a", fill).iterdir()] == ["first"]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
