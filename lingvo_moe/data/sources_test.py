"""A source reads what is below its root and nothing else, in an order that names decide."""

from __future__ import annotations

from pathlib import Path

import pytest

from lingvo_moe.data import sources
from lingvo_moe.data.sources import Folder
from lingvo_moe.errors import UserError


@pytest.fixture
def root(tmp_path) -> Path:
    root = tmp_path / "texts"
    (root / "sub").mkdir(parents=True)
    texts = {"fr.tsv": "oui\tyes\n", "de.tsv": "ja\tyes\n", "sub/it.tsv": "sì\tyes\n", "README": "no catalog"}
    for name, text in texts.items():
        (root / name).write_text(text, encoding="utf-8")
    return root


def _read(folder: Folder) -> list[tuple[str, str]]:
    return [(entry.language, entry.translation) for part in folder.parts() for entry in part.entries]


def test_a_folder_in_the_order_of_its_names(root):
    folder = sources.own(str(root))
    assert _read(folder) == [("de", "ja"), ("fr", "oui"), ("it", "sì")]
    assert [part.name for part in folder.parts()] == ["texts/de.tsv", "texts/fr.tsv", "texts/sub/it.tsv"]
    assert folder.size == sum(part.size for part in folder.parts()) == 7 + 8 + 8


def test_a_single_file(root):
    assert _read(sources.own(str(root / "de.tsv"))) == [("de", "ja")]


def test_the_identity_follows_names_and_contents(root):
    before = sources.own(str(root)).identity()
    assert sources.own(str(root)).identity() == before
    (root / "README").write_text("changed")
    assert sources.own(str(root)).identity() == before
    (root / "de.tsv").rename(root / "nl.tsv")
    renamed = sources.own(str(root)).identity()
    (root / "nl.tsv").write_text("ja\tno\n")
    assert len({before, renamed, sources.own(str(root)).identity()}) == 3


def test_links_that_lead_out_are_left_out_and_counted(root, tmp_path):
    """Or a link inside an archive could pull any file of the machine into a corpus."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "es.tsv").write_text("sí\tyes\n", encoding="utf-8")
    (root / "es.tsv").symlink_to(tmp_path / "outside" / "es.tsv")
    (root / "pt.tsv").symlink_to("../outside/es.tsv")
    (root / "linked").symlink_to(tmp_path / "outside", target_is_directory=True)
    (root / "nl.tsv").symlink_to(root / "de.tsv")
    (root / "gone.tsv").symlink_to(root / "nothing.tsv")
    folder = sources.own(str(root))
    assert [language for language, _ in _read(folder)] == ["de", "fr", "nl", "it"]
    assert folder.links_left_out == 2


def test_a_root_that_the_user_names_may_be_a_link(root, tmp_path):
    (tmp_path / "link").symlink_to(root, target_is_directory=True)
    assert len(_read(sources.own(str(tmp_path / "link")))) == 3


@pytest.mark.parametrize(
    "path, message",
    [
        ("nowhere", "nowhere: no such file or directory"),
        ("texts/README", "README: expected a .tsv, .po, .mo"),
        ("empty", "empty: no .tsv, .po, .mo or .json file"),
    ],
)
def test_nothing_to_read(root, tmp_path, path, message):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=message):
        sources.own(str(tmp_path / path))


def test_django_that_is_absent(monkeypatch):
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="Install it: pip install Django"):
        sources.django()
