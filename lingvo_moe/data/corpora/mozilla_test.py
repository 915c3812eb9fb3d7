"""Protects the messages of Firefox and Thunderbird: which packages are fetched, and what is unpacked of them."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from lingvo_moe.data.corpora import mozilla
from lingvo_moe.data.corpora.catalogs import Entry
from lingvo_moe.errors import UserError

_PACKAGES = {
    "firefox-esr": {
        "lib/omni.ja": {
            "localization/en-US/toolkit/a.ftl": b"a = Close { -brand }. It is safe.\nb = Only in English",
            "chrome/en-US/a.ftl": b"c = No localization",
        },
        "lib/browser/omni.ja": {
            "localization/en-US/brand.ftl": b"\xef\xbb\xbf-brand = Firefox",
            "localization/en-US/a.ftl": b"a = Another file",
        },
    },
    "firefox-esr-l10n-pt-br": {
        "x/langpack-pt-BR.xpi": {
            "localization/pt-BR/toolkit/a.ftl": "a = Fechar { -brand }. É seguro.".encode(),
            "browser/localization/pt-BR/a.ftl": b"a = Outro arquivo",
            "browser/localization/pt-BR/brand.ftl": b"-brand = o Firefox",
            "browser/localization/../evil/x.ftl": b"a = b",
        },
    },
}


def _write_archive(path: Path, members: dict[str, bytes]):
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name, content)


@pytest.fixture
def asked(monkeypatch, tmp_path) -> list[str]:
    """The packages that are asked for; the distribution has those of Firefox alone."""
    names: list[str] = []

    def fetch_archives(cache, requested):
        names.extend(requested)
        paths = {name: tmp_path / f"{name}_1.deb" for name in requested if name in _PACKAGES}
        for path in paths.values():
            path.write_text(path.name)
        return paths

    _write_archive(tmp_path / "outside.ja", {"localization/pt-BR/toolkit/a.ftl": b"a = a file of the machine"})

    def unpack(path, directory):
        name = path.name.partition("_")[0]
        names.append(f"unpacked {name}")
        for archive, members in _PACKAGES[name].items():
            _write_archive(Path(directory, archive), members)
        Path(directory, "z-link.ja").symlink_to(tmp_path / "outside.ja")

    monkeypatch.setattr(mozilla.debian, "fetch_archives", fetch_archives)
    monkeypatch.setattr(mozilla.debian, "unpack", unpack)
    return names


def _entries(cache: Path) -> list[Entry]:
    (firefox,) = mozilla.fetch(cache, ("pt_BR",)).sources
    return [entry for file in firefox.files() for entry in file.entries]


def test_messages_are_paired_by_file_and_id(asked, tmp_path):
    """Both archives of the application are read, and each language has its own terms; sentences are divided."""
    assert _entries(tmp_path / "cache") == [
        Entry("pt_BR", "Close Firefox.", "Fechar o Firefox."),
        Entry("pt_BR", "It is safe.", "É seguro."),
        Entry("pt_BR", "Another file", "Outro arquivo"),
    ]


def test_unpacks_once(asked, tmp_path):
    """Unpacking an application takes many seconds; the texts stay in the cache, and nothing else does."""
    first = _entries(tmp_path / "cache")
    asked.clear()
    assert _entries(tmp_path / "cache") == first
    assert not any(name.startswith("unpacked") for name in asked)
    (directory,) = (tmp_path / "cache").glob("firefox-esr-*")
    assert sorted(path.name for path in directory.iterdir()) == ["en.json", "pt_BR.json"]


def test_packages_of_the_selected_languages(asked, tmp_path):
    """What the distribution lacks is reported; an application without a selected language is not fetched."""
    fetched = mozilla.fetch(tmp_path, ("pt_BR",))
    packages = [name for name in asked if not name.startswith("unpacked")]
    assert packages == ["firefox-esr", "firefox-esr-l10n-pt-br", "thunderbird", "thunderbird-l10n-pt-br"]
    assert fetched.missing_packages == ["thunderbird", "thunderbird-l10n-pt-br"]
    assert [source.name for source in fetched.sources] == ["firefox-esr_1.deb"]
    asked.clear()
    mozilla.fetch(tmp_path, ("eo",))
    assert "firefox-esr" in asked and "thunderbird" not in asked
    asked.clear()
    mozilla.fetch(tmp_path)
    assert len([name for name in asked if "-l10n-" in name]) > 150


@pytest.mark.parametrize("selected", ["ku", "sr_Latn"])
def test_languages_without_a_package_have_no_source(tmp_path, selected):
    """A preset with other sources must not fail for them; nothing is asked of apt."""
    assert mozilla.fetch(tmp_path, (selected,)) == mozilla.SourceList([])


def test_other_english_messages_are_another_source(asked, tmp_path):
    """A corpus is built anew if its English texts change, though English is none of its languages."""
    before = mozilla.fetch(tmp_path, ("pt_BR",)).sources[0].identity()
    (english,) = tmp_path.glob("firefox-esr-*/en.json")
    english.write_text(english.read_text(encoding="utf-8").replace("Close", "Shut"), encoding="utf-8")
    assert mozilla.fetch(tmp_path, ("pt_BR",)).sources[0].identity() != before


def test_another_version_of_a_package_is_unpacked_again(asked, tmp_path, monkeypatch):
    """Else the texts of an old version would be read after an update."""
    _entries(tmp_path / "cache")
    archives = mozilla.debian.fetch_archives

    def newer(cache, requested):
        paths = archives(cache, requested)
        paths["firefox-esr-l10n-pt-br"].write_text("a newer one")
        return paths

    monkeypatch.setattr(mozilla.debian, "fetch_archives", newer)
    asked.clear()
    _entries(tmp_path / "cache")
    assert "unpacked firefox-esr-l10n-pt-br" in asked


@pytest.mark.parametrize(
    "members, message",
    [
        (None, r"its messages are not readable \(File is not a zip file\)\. Delete it"),
        (
            {"localization/en-US/damaged.ftl": b"a = b"},
            r"its messages are not readable \(Error -3 while decomp.*Delete it",
        ),
        ({"localization/en-US/a.ftl": b"a = \xff"}, r"its messages are not readable \('utf-8' codec .*Delete it"),
        ({"locale/en-US/a.ftl": b"a = b"}, r"expected Fluent files, localization/LANG/\*\.ftl, in a ZIP archive"),
    ],
)
def test_unreadable_package_is_an_error_that_names_it(asked, tmp_path, monkeypatch, members, message):
    """With what was expected and the remedy; no half of it stays in the cache."""

    def unpack(path, directory):
        _write_archive(Path(directory, "omni.ja"), members or {})
        archive = Path(directory, "omni.ja")
        if members is None:
            archive.write_text("PK no zip")
        elif "localization/en-US/damaged.ftl" in members:
            content = archive.read_bytes()
            start = content.index(b".ftl") + len(b".ftl")
            archive.write_bytes(content[:start] + b"\xff" + content[start + 1 :])

    monkeypatch.setattr(mozilla.debian, "unpack", unpack)
    with pytest.raises(UserError, match=rf"firefox-esr_1\.deb: {message}"):
        mozilla.fetch(tmp_path / "cache", ("pt_BR",))
    assert not any((tmp_path / "cache").iterdir())
