"""Protects the messages of Firefox and Thunderbird: which packages are fetched, and what is unpacked of them."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from lingvo_moe.data import mozilla
from lingvo_moe.data.catalogs import Entry
from lingvo_moe.errors import UserError

_PACKAGES = {
    "firefox-esr": {
        "lib/omni.ja": {
            "localization/en-US/toolkit/a.ftl": "a = Close { -brand }. It is safe.\nb = Only in English",
            "chrome/en-US/a.ftl": "c = No localization",
        },
        "lib/browser/omni.ja": {
            "localization/en-US/brand.ftl": "-brand = Firefox",
            "localization/en-US/a.ftl": "a = Another file",
        },
    },
    "firefox-esr-l10n-pt-br": {
        "x/langpack-pt-BR.xpi": {
            "localization/pt-BR/toolkit/a.ftl": "a = Fechar { -brand }. É seguro.",
            "browser/localization/pt-BR/a.ftl": "a = Outro arquivo",
            "browser/localization/pt-BR/brand.ftl": "-brand = o Firefox",
            "browser/localization/../evil/x.ftl": "a = b",
        },
    },
}


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

    def unpack(path, directory):
        name = path.name.partition("_")[0]
        names.append(f"unpacked {name}")
        for archive, members in _PACKAGES[name].items():
            target = Path(directory, archive)
            target.parent.mkdir(parents=True)
            with zipfile.ZipFile(target, "w") as file:
                for member, text in members.items():
                    file.writestr(member, text)
        # Debian has Thunderbird's archive in another place, with a link to it.
        (Path(directory) / "link.ja").symlink_to(target)

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


def test_damaged_archive_is_an_error_that_names_the_package(asked, tmp_path, monkeypatch):
    """With the archive in it and the remedy; no half of it stays in the cache."""

    def unpack(path, directory):
        Path(directory, "omni.ja").write_text("PK no zip")

    monkeypatch.setattr(mozilla.debian, "unpack", unpack)
    with pytest.raises(UserError, match=r"firefox-esr_1\.deb: omni\.ja in it is not readable \(.*Delete the package"):
        mozilla.fetch(tmp_path / "cache", ("pt_BR",))
    assert not any((tmp_path / "cache").iterdir())
