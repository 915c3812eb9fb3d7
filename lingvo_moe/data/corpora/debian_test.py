"""Protects the Debian preset: packages are downloaded once, completely or not at all. A script stands in for apt."""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import io
import json
import os
import shutil
import sys
import tarfile
from pathlib import Path

import pytest

from lingvo_moe.data.corpora import debian, help_pages
from lingvo_moe.data.corpora.catalogs import Entry
from lingvo_moe.errors import UserError
from lingvo_moe.utils import file_lock
from lingvo_moe.utils.hashes import sha256

_TOOL = """#!{python}
import hashlib, pathlib, re, shutil, sys, tarfile
mirror, log = pathlib.Path({mirror!r}), pathlib.Path({log!r})
arguments = [word for word in sys.argv[1:] if not word.startswith("-")]
tool = pathlib.Path(sys.argv[0]).name
with log.open("a") as file:
    print(tool, *(word for word in sys.argv[1:] if not word.startswith("--config") and word != "-q"), file=file)
if tool == "dpkg-deb":
    try:
        tarfile.open(arguments[0]).extractall(arguments[1])
    except tarfile.ReadError:
        sys.exit("dpkg-deb: error: not a Debian format archive")
elif (mirror / "down").exists() and tool == "apt-get" and "--print-uris" not in sys.argv:
    sys.exit("W: a warning\\nE: Could not resolve 'mirror'")
elif arguments[0] == "update":
    configuration = pathlib.Path(sys.argv[1].partition("=")[2]).read_text()
    lists = re.search('Dir::State::Lists "(.*)";', configuration)[1]
    for path in mirror.glob("*Translation*"):
        shutil.copy(path, lists)
elif arguments[0] == "policy":
    for name in arguments[1:]:
        if (mirror / (name + "_1.deb")).exists():
            print(name + ":\\n  Installed: (none)\\n  Candidate: 1\\n  Version table:")
else:
    for name in arguments[1:]:
        path = mirror / (name + "_1.deb")
        if "--print-uris" in sys.argv:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            print(f"'http://mirror/{{path.name}}' {{path.name}} 9 SHA256:{{digest}}")
        else:
            shutil.copy(path, path.name)
"""
_ENGLISH = """Package: a
Description-md5: {one}
Description-en: first game
 You play it.
 .
 It has  two parts.

Package: b
Description-md5: {two}
Description-en: second game
 One part.

"""
_GERMAN = """Package: a
Description-md5: {one}
Description-de: erstes Spiel
 Man spielt es.
 .
 Es hat zwei Teile.

Package: b
Description-md5: {two}
Description-de: zweites Spiel
 Ein Teil.
 .
 Noch ein Teil.

Package: c
Description-md5: {unknown}
Description-de: drittes Spiel
"""
_DIGESTS = {"one": "1" * 32, "two": "2" * 32, "unknown": "3" * 32}


@pytest.fixture
def mirror(tmp_path, monkeypatch) -> Path:
    """A mirror with four packages (a TSV in each) and descriptions in two languages; the tools are first in PATH."""
    monkeypatch.setattr(debian, "PACKAGES", ("alpha", "beta", "gamma", "delta", "epsilon"))
    monkeypatch.setattr(debian, "DESCRIPTION_LANGUAGES", ("en", "pt_BR"))
    mirror, tools = tmp_path / "mirror", tmp_path / "tools"
    mirror.mkdir()
    tools.mkdir()
    for name in debian.PACKAGES:
        (tmp_path / "de.tsv").write_text(f"{name} auf Deutsch\t{name} in English\n")
        with tarfile.open(mirror / f"{name}_1.deb", "w") as archive:
            archive.add(tmp_path / "de.tsv", "usr/share/de.tsv")
    (mirror / "x_main_i18n_Translation-en").write_text(_ENGLISH.format(**_DIGESTS))
    (mirror / "x_main_i18n_Translation-pt%5fBR").write_text(_GERMAN.format(**_DIGESTS).replace("-de:", "-pt_BR:"))
    for tool in ("apt-get", "apt-cache", "dpkg-deb"):
        (tools / tool).write_text(_TOOL.format(python=sys.executable, mirror=str(mirror), log=str(tmp_path / "log")))
        (tools / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    return mirror


def _index(cache: Path) -> Path:
    """The index of the cache's only list of packages."""
    (path,) = cache.glob("packages-*.json")
    return path


@pytest.fixture
def log(tmp_path) -> Path:
    """The calls of the tools since the last `_calls`."""
    return tmp_path / "log"


def _calls(log: Path) -> list[str]:
    lines = log.read_text().splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    return lines


def _downloads(log: Path) -> list[str]:
    """Returns the packages that apt has downloaded since the last call."""
    calls = [line.split() for line in _calls(log) if line.startswith("apt-get download")]
    return [name for call in calls if "--print-uris" not in call for name in call[2:]]


def _entries(fetched) -> list[Entry]:
    return [entry for source in fetched for file in source.files() for entry in file.entries]


def test_packages_and_descriptions(mirror, tmp_path):
    """Catalogs come from packages, and paragraphs of translated descriptions are paired with the English ones."""
    fetched, missing, _ = debian.debian_preset(tmp_path / "cache", ())
    assert missing == []
    entries = _entries(fetched)
    assert entries[:5] == [Entry("de", f"{name} in English", f"{name} auf Deutsch") for name in debian.PACKAGES]
    assert [(entry.english.split(), entry.translation.split()) for entry in entries[5:]] == [
        (["first", "game"], ["erstes", "Spiel"]),
        (["You", "play", "it."], ["Man", "spielt", "es."]),
        (["It", "has", "two", "parts."], ["Es", "hat", "zwei", "Teile."]),
        (["second", "game"], ["zweites", "Spiel"]),
    ]
    assert {entry.language for entry in entries[5:]} == {"pt_BR"}
    assert not list((tmp_path / "cache").glob("unpacked-*"))


def test_help_pages_of_two_packages(mirror, tmp_path):
    """LibreOffice's pages have their English texts in a package of their own; both decide the identity."""
    cache, page = tmp_path / "cache", '<html><p id="par_1">{}</p></html>'
    cache.mkdir()
    for package, folder, text in (("english", "en-US", "Yes."), ("german", "de", "Ja."), ("other", "en-US", "No.")):
        (tmp_path / "page.html").write_text(page.format(text))
        with tarfile.open(cache / f"{package}.deb", "w") as archive:
            archive.add(tmp_path / "page.html", f"usr/share/help/{folder}/text/page.html")
            archive.add(tmp_path / "page.html", "usr/share/fr.tsv")
    alone, beside, other = (
        debian.Package(cache / "german.deb", ("de",), help_pages.SUFFIXES, english and cache / f"{english}.deb")
        for english in (None, "english", "other")
    )
    assert _entries([alone]) == []
    assert _entries([beside]) == [Entry("de", "Yes.", "Ja.")] and _entries([other]) == [Entry("de", "No.", "Ja.")]
    assert len({package.identity() for package in (alone, beside, other)}) == 3


def test_file_sizes_of_a_package_add_up_to_its_size(mirror, tmp_path):
    """The progress bar ends at its total."""
    package = debian.debian_preset(tmp_path / "cache", ()).sources[0]
    assert sum(file.size for file in package.files()) == pytest.approx(package.size)


def test_intact_packages_are_not_downloaded_again_and_need_no_network(mirror, tmp_path, log):
    """A second build works offline."""
    first = debian.debian_preset(tmp_path / "cache", ()).sources
    _calls(log)
    (mirror / "down").touch()
    second = debian.debian_preset(tmp_path / "cache", ()).sources
    assert _calls(log) == []
    assert [source.identity() for source in first] == [source.identity() for source in second]


@pytest.mark.parametrize("lost", ["*", "*-en", "*-pt*"])
def test_lost_lists_are_downloaded_again(mirror, tmp_path, log, lost):
    """Or a corpus is built without the descriptions, although all packages are there."""
    cache = tmp_path / "cache"
    debian.fetch_descriptions(cache)
    for path in (cache / "lists").glob(f"x_{lost}"):
        path.unlink()
    _calls(log)
    assert len(_entries([debian.fetch_descriptions(cache, ("pt_BR",))])) == 4
    assert _calls(log) == ["apt-get update"]


def test_a_list_that_the_distribution_lacks_is_reported(mirror, tmp_path, caplog):
    """apt-get update succeeds without it."""
    (mirror / "x_main_i18n_Translation-pt%5fBR").unlink()
    assert _entries([debian.fetch_descriptions(tmp_path / "cache")]) == []
    assert caplog.messages == ["apt has no package descriptions in pt_BR; the corpus is built without them"]


def test_cache_of_another_list_of_packages_is_completed(mirror, tmp_path, log, monkeypatch):
    """A new release of the preset downloads what is new."""
    with monkeypatch.context() as patch:
        patch.setattr(debian, "PACKAGES", debian.PACKAGES[1:])
        debian.debian_preset(tmp_path / "cache", ())
    _calls(log)
    assert len(debian.debian_preset(tmp_path / "cache", ()).sources) == 6
    assert _downloads(log) == ["alpha"]


def test_only_a_corrupt_package_is_downloaded_again(mirror, tmp_path, log):
    """The hash of every package is checked."""
    cache = tmp_path / "cache"
    debian.debian_preset(cache, ())
    _calls(log)
    complete = (cache / "beta_1.deb").read_bytes()
    (cache / "beta_1.deb").write_bytes(complete[:-1])
    debian.debian_preset(cache, ())
    assert _downloads(log) == ["beta"]
    assert (cache / "beta_1.deb").read_bytes() == complete


def test_only_the_selected_languages_are_fetched_and_read(mirror, tmp_path, log, monkeypatch):
    """A package of another language is not downloaded, and its catalogs and descriptions are not read."""
    monkeypatch.setattr(debian, "_ONE_LANGUAGE", {"beta": "xh", "gamma": "pt_BR"})
    fetched = debian.debian_preset(tmp_path / "cache", ("pt_BR",)).sources
    assert _downloads(log) == ["alpha", "gamma", "delta", "epsilon"]
    assert [source.name for source in fetched][-1] == "package descriptions"
    assert {entry.language for entry in _entries(fetched[-1:])} == {"pt_BR"}
    fetched = debian.debian_preset(tmp_path / "cache", ("xh",)).sources
    assert _entries(fetched[-1:]) == [] and _downloads(log) == ["beta"]


def test_interrupted_download_resumes(mirror, tmp_path, log, monkeypatch):
    """Complete packages are kept, an incomplete one is downloaded again."""
    cache, download = tmp_path / "cache", debian._Apt.download

    def interrupted(self, archives):
        if archives[0].name == "gamma":
            (cache / "partial" / archives[0].file).write_bytes(b"half of it")
            raise KeyboardInterrupt
        download(self, archives)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(debian._Apt, "download", interrupted)
        patch.setattr(debian, "_AT_ONCE", 2)
        debian.debian_preset(cache, ())
    assert sorted(path.name for path in cache.glob("*.deb")) == ["alpha_1.deb", "beta_1.deb"]
    _calls(log)
    assert len(debian.debian_preset(cache, ()).sources) == 6
    assert _downloads(log) == ["gamma", "delta", "epsilon"]


def test_a_second_process_waits_for_the_first(mirror, tmp_path, log, caplog):
    """All builds have one cache: without the lock, they move away each other's downloads."""
    cache = tmp_path / "cache"
    cache.mkdir()
    with (
        caplog.at_level("INFO", file_lock.__name__),
        concurrent.futures.ThreadPoolExecutor() as threads,
        open(cache / "lock", "wb") as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = threads.submit(debian.fetch_archives, cache, ["alpha"])
        with pytest.raises(concurrent.futures.TimeoutError):
            second.result(0.3)
        assert _calls(log) == [] and caplog.messages == [f"waiting for another process that works in {cache} ..."]
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert second.result() == {"alpha": cache / "alpha_1.deb"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's apt changes the user that downloads")
def test_downloads_stay_in_apts_sandbox(mirror, tmp_path, monkeypatch):
    """Run as root, apt downloads as the user `_apt`, which must be able to write to the directory."""
    owners = {}
    monkeypatch.setattr(debian.shutil, "chown", lambda path, user: owners.update({path.name: user}))
    debian.debian_preset(tmp_path / "cache", ())
    assert owners == {"partial": "_apt"}
    assert "Sandbox" not in (tmp_path / "cache" / "apt.conf").read_text()


def test_package_with_another_hash_is_an_error(mirror, tmp_path, monkeypatch):
    """A mirror cannot replace a package."""
    monkeypatch.setattr(debian, "file_sha256", lambda path: sha256(b"other"))
    with pytest.raises(UserError, match="cannot download the package alpha .*run the same command again"):
        debian.debian_preset(tmp_path / "cache", ())


def test_no_network_is_an_error_with_apts_reason(mirror, tmp_path):
    """Apt's own first error is shown."""
    (mirror / "down").touch()
    with pytest.raises(
        UserError, match=r"apt-get update downloaded no package lists \(E: Could not resolve 'mirror'\)"
    ):
        debian.debian_preset(tmp_path / "cache", ())


def test_failed_download_is_an_error_that_names_the_package(mirror, tmp_path):
    """With apt's reason."""
    cache = tmp_path / "cache"
    debian.debian_preset(cache, ())
    (cache / "delta_1.deb").unlink()
    (mirror / "down").touch()
    with pytest.raises(UserError, match=r"cannot download the package delta \(E: Could not resolve 'mirror'\)"):
        debian.debian_preset(cache, ())


def test_the_others_of_a_failed_download_are_kept(mirror, tmp_path, monkeypatch):
    """Several packages are downloaded at once; the corrupt one is named."""
    intact = debian._is_intact
    monkeypatch.setattr(debian, "_is_intact", lambda path, archive: archive.name != "beta" and intact(path, archive))
    with pytest.raises(UserError, match="cannot download the package beta "):
        debian.debian_preset(tmp_path / "cache", ())
    kept = {path.name for path in (tmp_path / "cache").glob("*.deb")}
    assert kept == {"alpha_1.deb", "gamma_1.deb", "delta_1.deb", "epsilon_1.deb"}


def test_package_that_the_distribution_lacks_is_reported(mirror, tmp_path):
    """The corpus is built without it, and its report warns."""
    (mirror / "beta_1.deb").unlink()
    fetched, missing, _ = debian.debian_preset(tmp_path / "cache", ())
    assert missing == ["beta"] and len(fetched) == 5


def test_too_many_missing_packages_are_an_error(mirror, tmp_path):
    """Another distribution would give another corpus."""
    (mirror / "beta_1.deb").unlink()
    (mirror / "delta_1.deb").unlink()
    with pytest.raises(UserError, match="has 3 of the 5 packages; missing are beta, delta"):
        debian.debian_preset(tmp_path / "cache", ())


def test_missing_apt_is_an_error(tmp_path, monkeypatch):
    """With another preset as the remedy."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="needs apt-get, which this machine does not have"):
        debian.debian_preset(tmp_path / "cache", ())


def test_invalid_archive_is_an_error(mirror, tmp_path):
    """dpkg-deb's reason is shown."""
    (mirror / "alpha_1.deb").write_bytes(b"no archive")
    fetched = debian.debian_preset(tmp_path / "cache", ()).sources
    with pytest.raises(UserError, match=r"alpha_1\.deb: cannot be unpacked \(dpkg-deb: error: not a Debian format"):
        _entries(fetched)


@pytest.mark.parametrize("file", ["../mirror/alpha_1.deb", "/etc/passwd", "a/b.deb", "", "c:x.deb", 3])
def test_index_with_a_path_outside_of_the_cache_is_refused(mirror, tmp_path, file):
    """The error names the index and the value."""
    cache = tmp_path / "cache"
    debian.debian_preset(cache, ())
    index = json.loads(_index(cache).read_text())
    index["archives"][0]["file"] = file
    _index(cache).write_text(json.dumps(index))
    with pytest.raises(UserError, match="cache/packages-[0-9a-f]*.json, field file: "):
        debian.debian_preset(cache, ())


def test_index_of_another_version_is_written_again(mirror, tmp_path, log):
    """Version 1 had other keys; the packages are in the cache and are not downloaded again."""
    cache = tmp_path / "cache"
    debian.debian_preset(cache, ())
    _calls(log)
    _index(cache).write_text(json.dumps({"wanted": list(debian.PACKAGES), "found": []}))
    assert len(debian.debian_preset(cache, ()).sources) == 6
    assert _downloads(log) == []


def _deb(path: Path, members: list[tarfile.TarInfo]):
    """Writes a Debian package: an `ar` archive of a version, a control archive and a data archive."""

    def tar(infos: list[tuple[tarfile.TarInfo, bytes]]) -> bytes:
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as archive:
            for info, content in infos:
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
        return data.getvalue()

    control = tar(
        [(tarfile.TarInfo("./control"), b"Package: x\nVersion: 1\nArchitecture: all\nMaintainer: x\nDescription: x\n")]
    )
    data = tar([(info, b"ja\tyes\n" if info.isreg() else b"") for info in members])
    archive = b"!<arch>\n"
    for name, content in (("debian-binary", b"2.0\n"), ("control.tar", control), ("data.tar", data)):
        header = f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n"
        archive += header.encode() + content + b"\n" * (len(content) % 2)
    path.write_bytes(archive)


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs dpkg-deb of Debian")
@pytest.mark.parametrize("member", ["../out.tsv", "/tmp/lingvo_moe_out.tsv", "a/../../out.tsv", "link/out.tsv"])
def test_members_outside_of_a_package_are_not_written(tmp_path, member):
    """The real dpkg-deb writes nothing outside of the temporary directory, not even through a symbolic link."""
    cache = tmp_path / "cache"
    cache.mkdir()
    link = tarfile.TarInfo("link")
    link.type, link.linkname = tarfile.SYMTYPE, "../.."
    _deb(cache / "x_1.deb", [tarfile.TarInfo("de.tsv"), link, tarfile.TarInfo(member)])
    _deb(tmp_path / "good_1.deb", [tarfile.TarInfo("de.tsv")])
    assert len(_entries([debian.Package(tmp_path / "good_1.deb")])) == 1
    with contextlib.suppress(UserError):
        assert all(entry.language == "de" for entry in _entries([debian.Package(cache / "x_1.deb")]))
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["cache", "good_1.deb", "x_1.deb"]
    assert not Path("/tmp/lingvo_moe_out.tsv").exists()
