"""Protects the preset `pocket`: which packages it reads, of which languages, and that packages to test on stay out."""

from __future__ import annotations

from pathlib import Path

import pytest

from lingvo_moe.data import languages
from lingvo_moe.data.corpora import corpus_builder, pocket, wheels
from lingvo_moe.data.corpora.catalogs import Entry
from lingvo_moe.data.corpora.sources import EntrySource, SourceList


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """The packages that the preset asks for; instead of all sources it gets four entries in three languages."""
    names: list[str] = []
    entries = [Entry("de", "file", "Datei"), Entry("ka", "file", "ფაილი"), Entry("nl", "file", "bestand")]

    def fetch(cache, requested, selected):
        names.extend(requested)
        return SourceList([EntrySource("packages", entries)], ["absent"])

    monkeypatch.setattr(pocket.debian, "fetch", fetch)
    descriptions = EntrySource("package descriptions", [])
    monkeypatch.setattr(pocket.debian, "fetch_descriptions", lambda cache, selected: descriptions)
    monkeypatch.setattr(
        pocket.wheels,
        "pypi_preset",
        lambda cache, selected: SourceList([EntrySource("wheels", [Entry("de", "tree", "Baum")])]),
    )
    pages = SourceList([EntrySource("help pages", [])], ["no manual"])
    monkeypatch.setattr(pocket.debian_help, "fetch", lambda cache, selected: pages)
    messages = SourceList([EntrySource("Firefox", [])], ["no Firefox", "absent"])

    def fetch_messages(cache, selected):
        assert selected, "the packages of all languages would be fetched"
        return messages

    monkeypatch.setattr(pocket.mozilla, "fetch", fetch_messages)
    npm = EntrySource("npm", [Entry("nl", "One. Two.", "Een. Twee.")])
    monkeypatch.setattr(pocket.npm_packages, "fetch", lambda cache, packages, selected: [npm])
    return names


def test_reads_its_own_languages_unless_some_are_selected(asked, tmp_path):
    """A catalog of another language in one of the packages does not get into the corpus."""
    by_default, _ = corpus_builder.build("pocket", (), tmp_path / "corpus", tmp_path / "cache")
    assert list(by_default.languages) == ["de", "nl"]
    assert by_default.manifest["inputs"] == [
        "packages",
        "help pages",
        "Firefox",
        "package descriptions",
        "wheels",
        "npm",
    ]
    assert by_default.manifest["missing_packages"] == ["absent", "no manual", "no Firefox"]
    assert ("Twee.", "Two.") in list(by_default.pairs("train", "nl"))
    selected, _ = corpus_builder.build("pocket", (), tmp_path / "nl", tmp_path / "cache", selected=frozenset(("nl",)))
    assert list(selected.languages) == ["nl"]


def test_fetches_the_office_catalogs_of_the_languages_that_are_read(asked):
    """LibreOffice has a package for each language, with its own spelling of the label."""
    pocket.pocket_preset(Path("cache"), ())
    office = [name for name in asked if name.startswith("libreoffice")]
    assert {languages.normalize(name.removeprefix("libreoffice-l10n-")) for name in office} == set(pocket.LANGUAGES)
    asked.clear()
    pocket.pocket_preset(Path("cache"), ("pt_BR",))
    assert [name for name in asked if name.startswith("libreoffice")] == ["libreoffice-l10n-pt-br"]


def test_packages_to_test_on_are_not_read(asked):
    """Training on them would make the test of other packages worthless."""
    pocket.pocket_preset(Path("cache"), ())
    assert len(asked) == len(set(asked)) > 200
    assert not {"freeciv-data", "gimp-data", "digikam-data"} & set(asked)
    assert wheels.HOME_ASSISTANT not in wheels.WHEELS
