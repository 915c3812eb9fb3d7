"""Protects which help pages are fetched, and that an office package is read beside the English one."""

from __future__ import annotations

from pathlib import Path

import pytest

from lingvo_moe.data.corpora import debian_help
from lingvo_moe.data.corpora.sentence_source import Sentences


@pytest.fixture
def asked(monkeypatch, tmp_path) -> list[str]:
    """The packages that are asked for; the distribution lacks evince-common."""
    names: list[str] = []

    def fetch_archives(cache, requested):
        names[:] = requested
        paths = {name: tmp_path / f"{name}.deb" for name in requested if name != "evince-common"}
        for path in paths.values():
            path.touch()
        return paths

    monkeypatch.setattr(debian_help.debian, "fetch_archives", fetch_archives)
    return names


def test_office_packages_of_the_selected_languages(asked):
    """LibreOffice has a package per language, a manual has all languages; a missing package is reported."""
    fetched = debian_help.fetch(Path("cache"), ("de", "pt_BR", "sr"))
    office = [name for name in asked if name.startswith("libreoffice")]
    assert office == ["libreoffice-help-en-us", "libreoffice-help-de", "libreoffice-help-pt-br"]
    assert fetched.missing_packages == ["evince-common"]
    assert all(isinstance(source, Sentences) for source in fetched.sources)
    names = [source.name for source in fetched.sources]
    assert "libreoffice-help-de.deb, help pages" in names
    assert "gnome-user-docs.deb, help pages" in names and "konqueror.deb, help pages" in names
    assert not any("en-us" in name for name in names)


def test_english_pages_are_not_fetched_alone(asked):
    """LibreOffice has no help in Serbian."""
    debian_help.fetch(Path("cache"), ("sr",))
    assert asked and not any(name.startswith("libreoffice") for name in asked)


def test_all_languages_by_default(asked):
    """Without a selection every language's package is fetched."""
    debian_help.fetch(Path("cache"))
    assert len([name for name in asked if name.startswith("libreoffice")]) > 25


def test_office_pages_are_unpacked_beside_the_english_ones(asked, monkeypatch):
    """Without the English package they would have no pairs."""
    read = {}
    package = debian_help.debian.Package
    monkeypatch.setattr(
        debian_help.debian,
        "Package",
        lambda path, *arguments: read.update({path.stem: arguments[2]}) or package(path, *arguments),
    )
    debian_help.fetch(Path("cache"), ("de",))
    assert read["libreoffice-help-de"].stem == "libreoffice-help-en-us" and read["gnome-user-docs"] is None
