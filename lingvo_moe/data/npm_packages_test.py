"""Protects the catalogs of npm packages: downloaded once, checked, unpacked safely. A script stands in for npm."""

from __future__ import annotations

import io
import json
import os
import sys
import tarfile
from pathlib import Path

import pytest

from lingvo_moe.data import npm_packages
from lingvo_moe.data.catalogs import Entry
from lingvo_moe.data.npm_packages import NpmPackage
from lingvo_moe.data.sources import sha256
from lingvo_moe.errors import UserError

_NPM = """#!{python}
import pathlib, shutil, sys
assert sys.argv[1:5] == ["pack", "@some/texts@1.0", "--ignore-scripts", "--silent"], sys.argv
archive = pathlib.Path({archive!r})
if not archive.exists():
    sys.exit("npm error 404 Not Found")
shutil.copy(archive, sys.argv[5].partition("=")[2] + "/some-texts-1.0.tgz")
"""
_CATALOG = r"package/(?P<folder>[^/]+/\w+|\.\./x)/(?P<label>[\w-]+)\.json"


@pytest.fixture
def archive(tmp_path, monkeypatch) -> Path:
    """The archive that npm downloads, to be written; npm is first in PATH."""
    (tmp_path / "bin").mkdir()
    archive, npm = tmp_path / "registry.tgz", tmp_path / "bin" / "npm"
    npm.write_text(_NPM.format(python=sys.executable, archive=str(archive)))
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{npm.parent}{os.pathsep}{os.environ['PATH']}")
    return archive


def _write(archive: Path, members: dict[str, object]) -> NpmPackage:
    with tarfile.open(archive, "w:gz") as file:
        for name, tree in members.items():
            data = json.dumps(tree).encode()
            member = tarfile.TarInfo(name)
            member.size = len(data)
            file.addfile(member, io.BytesIO(data))
    return NpmPackage("@some/texts", "1.0", sha256(archive), _CATALOG)


def _entries(cache: Path, package: NpmPackage, *selected: str) -> list[Entry]:
    (source,) = npm_packages.fetch(cache, (package,), selected)
    return [entry for file in source.files() for entry in file.entries]


def test_catalogs_are_unpacked_by_label(archive, tmp_path):
    """Whatever a package calls its English file, the others find it; other members are not unpacked."""
    package = _write(
        archive,
        {
            "package/a/ui/en_EN.json": {"yes": "Yes"},
            "package/a/ui/pt-br.json": {"yes": "Sim"},
            "package/b/ui/en.json": {"en": {"name": "Cafe", "x": {"terms": "bar"}}},
            "package/b/ui/de.json": {"de": {"name": "Café", "x": {"terms": "Bistro"}}},
            "package/index.js": "code",
        },
    )
    expected = [Entry("pt_BR", "Yes", "Sim"), Entry("de", "Cafe", "Café")]
    assert _entries(tmp_path / "cache", package) == expected
    assert _entries(tmp_path / "cache", package, "de") == expected[1:]
    assert not list((tmp_path / "cache").rglob("*.js"))


def test_intact_archive_is_not_downloaded_again(archive, tmp_path):
    """A second run, or one without a network, uses the cache; a corrupt archive is downloaded again."""
    package = _write(archive, {"package/a/ui/en.json": {"yes": "Yes"}, "package/a/ui/de.json": {"yes": "Ja"}})
    cache = tmp_path / "cache"
    assert _entries(cache, package) == [Entry("de", "Yes", "Ja")]
    archive.unlink()
    assert _entries(cache, package) == [Entry("de", "Yes", "Ja")]
    (cache / "some-texts-1.0").rename(cache / "elsewhere")
    assert _entries(cache, package) == [Entry("de", "Yes", "Ja")]
    (cache / "some-texts-1.0").rename(cache / "elsewhere too")
    (cache / "some-texts-1.0.tgz").write_bytes(b"corrupt")
    with pytest.raises(UserError, match="npm could not download @some/texts@1.0: npm error 404 Not Found\nCheck the"):
        _entries(cache, package)


def test_other_content_than_pinned_is_an_error(archive, tmp_path):
    """A registry cannot replace a package."""
    package = _write(archive, {"package/a/ui/en.json": {}})._replace(sha256="0" * 64)
    with pytest.raises(UserError, match="npm downloaded @some/texts@1.0 with another content than expected"):
        _entries(tmp_path / "cache", package)
    assert not (tmp_path / "cache" / "some-texts-1.0").exists()


def test_members_outside_of_the_archive_are_refused(archive, tmp_path):
    """An archive cannot write outside of its directory."""
    package = _write(archive, {"package/../x/de.json": {"yes": "Ja"}})
    with pytest.raises(UserError, match=r"some-texts-1\.0\.tgz, archive member: the path .* is refused"):
        _entries(tmp_path / "cache", package)
    assert not list(tmp_path.rglob("de.json")) and not (tmp_path / "cache" / "some-texts-1.0").exists()


def test_missing_npm_is_an_error_with_the_remedy(tmp_path, monkeypatch):
    """The other presets do not need it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    package = NpmPackage("texts", "1.0", "0" * 64, _CATALOG)
    with pytest.raises(UserError, match="needs npm to download texts@1.0.*apt install npm"):
        npm_packages.fetch(tmp_path / "cache", (package,))


def test_every_package_of_the_preset_is_pinned():
    """An exact version and a hash; the pattern has the groups that unpacking needs."""
    for package in npm_packages.PACKAGES:
        assert len(package.sha256) == 64 and "?P<folder>" in package.catalog and "?P<label>" in package.catalog
