"""Protects the preset `debian_more`: what it fetches, once, and that help pages are read beside the English ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from lingvo_moe.data import languages
from lingvo_moe.data.corpora import debian, debian_more, pocket
from lingvo_moe.data.corpora.sentence_source import Sentences


@pytest.fixture
def asked(monkeypatch, tmp_path) -> list[list[str]]:
    """The packages of each call that fetches; the distribution lacks vlc-l10n."""
    calls: list[list[str]] = []

    def fetch_archives(cache, requested):
        calls.append(list(requested))
        paths = {name: tmp_path / f"{name}.deb" for name in requested if name != "vlc-l10n"}
        for path in paths.values():
            path.touch()
        return paths

    monkeypatch.setattr(debian, "fetch_archives", fetch_archives)
    monkeypatch.setattr(debian, "fetch_descriptions", lambda cache, selected: debian.Descriptions(tmp_path, selected))
    return calls


def test_packages_of_the_selected_languages(asked):
    """apt's lists are fetched once; help is read sentence by sentence, without the English pages as a source."""
    read = debian_more.debian_more_preset(Path("cache"), ("pt_BR", "sr"))
    (names,) = asked
    office = [name for name in names if name.startswith("libreoffice")]
    assert office == [
        "libreoffice-l10n-pt-br",
        "libreoffice-l10n-sr",
        "libreoffice-help-en-us",
        "libreoffice-help-pt-br",
    ]
    assert {*debian.APPLICATIONS, *debian_more.APPLICATIONS} < set(names)
    assert read.missing_packages == ["vlc-l10n"]
    by_name = {source.name: source for source in read.sources}
    assert list(by_name)[-1] == "package descriptions" and not any("en-us" in name for name in by_name)
    assert isinstance(by_name["libreoffice-help-pt-br.deb, help pages"], Sentences)
    assert isinstance(by_name["libreoffice-l10n-pt-br.deb"], debian.Package)


def test_all_languages(asked):
    """Without a selection it reads what `debian` reads, no package twice, and the languages of `pocket`."""
    debian_more.debian_more_preset(Path("cache"), ())
    (names,) = asked
    assert set(debian.PACKAGES) < set(names) and len(names) == len(set(names))
    assert not {"freeciv-data", "gimp-data", "digikam-data"} & set(names)
    labels = {languages.normalize(name.removeprefix("libreoffice-l10n-")) for name in names}
    assert set(pocket.LANGUAGES) < labels
