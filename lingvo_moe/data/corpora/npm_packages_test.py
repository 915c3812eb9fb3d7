"""Protects the catalogs of npm packages: downloaded once, checked, unpacked safely. A script stands in for npm."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import sys
import tarfile
from pathlib import Path

import pytest

from lingvo_moe.data.corpora import npm_packages
from lingvo_moe.data.corpora.catalogs import Entry
from lingvo_moe.data.corpora.npm_packages import NpmPackage
from lingvo_moe.errors import UserError
from lingvo_moe.utils.hashes import file_sha256

_NPM = """#!{python}
import pathlib, shutil, sys
assert sys.argv[1:5] == ["pack", "@some/texts@1.0", "--ignore-scripts", "--loglevel=error"], sys.argv
archive = pathlib.Path({archive!r})
if not archive.exists():
    sys.exit("npm error code E404\\nnpm error 404 Not Found\\nnpm error A complete log of this run")
shutil.copy(archive, sys.argv[5].partition("=")[2] + "/some-texts-1.0.tgz")
"""
_PACKAGE = NpmPackage(
    "@some/texts",
    "1.0",
    "",
    r"package/(?P<folder>[^/]+/\w+|\.\./x)/(?P<label>[\w-]+)\.json",
    labels={"zh": "zh_Hans"},
    ignored=("terms",),
)


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
    return dataclasses.replace(_PACKAGE, sha256=file_sha256(archive))


def _entries(cache: Path, package: NpmPackage, *selected: str) -> list[Entry]:
    (source,) = npm_packages.fetch(cache, (package,), selected)
    return [entry for file in source.files() for entry in file.entries]


def _unpacked(cache: Path) -> Path | None:
    """The directory of the package's catalogs, if there is one."""
    directories = [path for path in cache.glob("some-texts-1.0-*") if path.is_dir()]
    assert len(directories) < 2
    return next(iter(directories), None)


def test_catalogs_are_unpacked_by_label(archive, tmp_path):
    """Whatever a package's layout: its own labels, a root named after one, lists of one text, and other words."""
    package = _write(
        archive,
        {
            "package/a/ui/en_EN.json": {"yes": "Yes"},
            "package/a/ui/pt-br.json": {"yes": "Sim"},
            "package/b/ui/en.json": {"en": {"name": "Cafe", "x": {"terms": "bar"}}},
            "package/b/ui/de.json": {"de": {"name": "Café", "x": {"terms": "Bistro"}}},
            "package/b/ui/zh.json": {"zh": {"name": ["咖啡馆"], "x": {"terms": "bar"}}},
            "package/b/ui/no.json": {"no": {"name": "Kafé", "x": {"terms": "bar"}}},
            "package/b/ui/nb.json": {"nb": {"name": "K."}},
            "package/index.js": "code",
        },
    )
    expected = [Entry("pt_BR", "Yes", "Sim"), Entry("de", "Cafe", "Café"), Entry("nb", "Cafe", "Kafé")]
    expected += [Entry("zh_Hans", "Cafe", "咖啡馆")]
    assert _entries(tmp_path / "cache", package) == expected
    assert _entries(tmp_path / "cache", package, "de") == expected[1:2]
    assert not list((tmp_path / "cache").rglob("*.js"))


def test_intact_archive_is_not_downloaded_again(archive, tmp_path):
    """A second run, or one without a network, uses the cache; a corrupt archive is downloaded again."""
    package = _write(archive, {"package/a/ui/en.json": {"yes": "Yes"}, "package/a/ui/de.json": {"yes": "Ja"}})
    cache = tmp_path / "cache"
    assert _entries(cache, package) == [Entry("de", "Yes", "Ja")]
    archive.unlink()
    assert _entries(cache, package) == [Entry("de", "Yes", "Ja")]
    shutil.rmtree(_unpacked(cache))
    assert _entries(cache, package) == [Entry("de", "Yes", "Ja")]
    shutil.rmtree(_unpacked(cache))
    (cache / "some-texts-1.0.tgz").write_bytes(b"corrupt")
    with pytest.raises(UserError, match="npm could not download @some/texts@1.0: npm error 404 Not Found\nCheck the"):
        _entries(cache, package)


def test_other_rules_unpack_again(archive, tmp_path):
    """A directory of an older release is not used."""
    package = _write(
        archive, {"package/a/ui/en.json": {"x": {"terms": "T"}}, "package/a/ui/de.json": {"x": {"terms": "D"}}}
    )
    assert _entries(tmp_path / "cache", package) == []
    assert _entries(tmp_path / "cache", dataclasses.replace(package, ignored=())) == [Entry("de", "T", "D")]


def test_other_content_than_pinned_is_an_error(archive, tmp_path):
    """A registry cannot replace a package."""
    package = dataclasses.replace(_write(archive, {"package/a/ui/en.json": {}}), sha256="0" * 64)
    with pytest.raises(UserError, match="npm downloaded @some/texts@1.0 with another content than expected"):
        _entries(tmp_path / "cache", package)
    assert _unpacked(tmp_path / "cache") is None


def test_links_are_not_unpacked(archive, tmp_path):
    """Nor is any other member that is not a regular file."""
    with tarfile.open(archive, "w:gz") as file:
        data = b'{"yes": "Yes"}'
        english = tarfile.TarInfo("package/a/ui/en.json")
        english.size = len(data)
        file.addfile(english, io.BytesIO(data))
        for name, kind in (("de", tarfile.SYMTYPE), ("fr", tarfile.LNKTYPE), ("it", tarfile.FIFOTYPE)):
            member = tarfile.TarInfo(f"package/a/ui/{name}.json")
            member.type, member.linkname, member.size = kind, "package/a/ui/en.json", 10
            file.addfile(member)
    package = dataclasses.replace(_PACKAGE, sha256=file_sha256(archive))
    assert _entries(tmp_path / "cache", package) == []


def test_catalog_that_is_not_json_is_an_error_that_names_it(archive, tmp_path):
    """With the archive and the member."""
    with tarfile.open(archive, "w:gz") as file:
        member = tarfile.TarInfo("package/a/ui/de.json")
        member.size = 1
        file.addfile(member, io.BytesIO(b"{"))
    package = dataclasses.replace(_PACKAGE, sha256=file_sha256(archive))
    with pytest.raises(UserError, match=r"some-texts-1\.0\.tgz: package/a/ui/de\.json is not a readable JSON catalog"):
        _entries(tmp_path / "cache", package)


def test_members_outside_of_the_archive_are_refused(archive, tmp_path):
    """An archive cannot write outside of its directory."""
    package = _write(archive, {"package/../x/de.json": {"yes": "Ja"}})
    with pytest.raises(UserError, match=r"some-texts-1\.0\.tgz, archive member: the path .* is refused"):
        _entries(tmp_path / "cache", package)
    assert not list(tmp_path.rglob("de.json")) and _unpacked(tmp_path / "cache") is None


def test_missing_npm_is_an_error_with_the_remedy(tmp_path, monkeypatch):
    """The other presets do not need it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    package = dataclasses.replace(_PACKAGE, name="texts")
    with pytest.raises(UserError, match="needs npm to download texts@1.0.*apt install npm"):
        npm_packages.fetch(tmp_path / "cache", (package,))


def test_every_package_of_the_preset_is_pinned():
    """An exact version and a hash; the pattern has the groups that unpacking needs."""
    for package in npm_packages.PACKAGES:
        assert len(package.sha256) == 64 and "?P<folder>" in package.catalog and "?P<label>" in package.catalog
