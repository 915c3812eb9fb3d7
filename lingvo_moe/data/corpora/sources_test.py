"""Protects data sources: the files they read, in which order, their registration as presets, and their errors."""

from __future__ import annotations

import errno
import os
import types
from collections.abc import Collection
from pathlib import Path

import pytest

from lingvo_moe.data.corpora import corpus_builder, sources
from lingvo_moe.data.corpora.catalogs import Entry
from lingvo_moe.data.corpora.collected_pairs import collect_pairs
from lingvo_moe.data.corpora.sources import EntrySource, SourceList, register_source
from lingvo_moe.errors import UserError


@pytest.fixture
def root(tmp_path) -> Path:
    root = tmp_path / "texts"
    (root / "sub").mkdir(parents=True)
    texts = {"fr.tsv": "oui\tyes\n", "de.tsv": "ja\tyes\n", "sub/it.tsv": "sì\tyes\n", "README": "no catalog"}
    for name, text in texts.items():
        (root / name).write_text(text, encoding="utf-8")
    return root


def _read(source: sources.Source) -> list[tuple[str | None, str]]:
    return [(entry.language, entry.translation) for file in source.files() for entry in file.entries]


def test_directory_is_read_in_the_order_of_its_paths(root):
    """The order does not depend on the file system, so the same files give the same corpus."""
    folder = sources.user_input(str(root))
    assert _read(folder) == [("de", "ja"), ("fr", "oui"), ("it", "sì")]
    assert [file.name for file in folder.files()] == ["texts/de.tsv", "texts/fr.tsv", "texts/sub/it.tsv"]
    assert folder.size == sum(file.size for file in folder.files()) == 7 + 8 + 8


def test_single_file(root):
    """--input may be a file."""
    assert _read(sources.user_input(str(root / "de.tsv"))) == [("de", "ja")]


def test_identity_depends_on_names_and_contents(root):
    """A change of a catalog rebuilds the corpus; a change of any other file does not."""
    before = sources.user_input(str(root)).identity()
    assert sources.user_input(str(root)).identity() == before
    (root / "README").write_text("changed")
    assert sources.user_input(str(root)).identity() == before
    (root / "de.tsv").rename(root / "nl.tsv")
    renamed = sources.user_input(str(root)).identity()
    (root / "nl.tsv").write_text("ja\tno\n")
    assert len({before, renamed, sources.user_input(str(root)).identity()}) == 3


def test_identity_depends_on_the_english_json_beside_a_file(root):
    """It has half of the text, although the file is named alone."""
    (root / "en.json").write_text('{"key": "yes"}', encoding="utf-8")
    (root / "de.json").write_text('{"key": "ja"}', encoding="utf-8")
    before = sources.user_input(root / "de.json").identity()
    assert sources.user_input(root / "de.json").identity() == before
    (root / "en.json").write_text('{"key": "aye"}', encoding="utf-8")
    assert sources.user_input(root / "de.json").identity() != before


def test_a_directory_that_cannot_be_read_is_an_error(root, monkeypatch):
    """Its catalogs would be missing, and nothing would say so."""
    scandir = os.scandir

    def refused(path):
        if os.fspath(path).endswith("sub"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(UserError, match="sub: this directory cannot be read .Permission denied"):
        sources.user_input(root)


def test_a_name_that_is_not_utf8_is_an_error(root):
    """The manifest could not name the file."""
    with open(os.path.join(os.fsencode(root), b"fran\xe7ais.tsv"), "wb") as file:
        file.write(b"oui\tyes\n")
    with pytest.raises(UserError, match=r"ais.tsv'?: the name of this file is not UTF-8; rename it"):
        sources.user_input(root)


def test_links_out_of_the_directory_are_skipped_and_counted(root, tmp_path):
    """A link inside an archive must not pull other files of the machine into a corpus."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "es.tsv").write_text("sí\tyes\n", encoding="utf-8")
    (root / "es.tsv").symlink_to(tmp_path / "outside" / "es.tsv")
    (root / "pt.tsv").symlink_to("../outside/es.tsv")
    (root / "linked").symlink_to(tmp_path / "outside", target_is_directory=True)
    (root / "nl.tsv").symlink_to(root / "de.tsv")
    (root / "gone.tsv").symlink_to(root / "nothing.tsv")
    folder = sources.user_input(str(root))
    assert [language for language, _ in _read(folder)] == ["de", "fr", "nl", "it"]
    assert folder.skipped_links == 2


def test_input_directory_may_be_a_link(root, tmp_path):
    """Only links inside of the directory are checked, not the path that the user gives."""
    (tmp_path / "link").symlink_to(root, target_is_directory=True)
    assert len(_read(sources.user_input(str(tmp_path / "link")))) == 3


@pytest.mark.parametrize(
    "path, message",
    [
        ("nowhere", "nowhere: no such file or directory"),
        ("texts/README", "README: expected a .tsv, .po, .mo or .json file, or a directory of them. Convert"),
        ("empty", "empty: no .tsv, .po, .mo or .json file"),
    ],
)
def test_input_without_catalogs_is_an_error(root, tmp_path, path, message):
    """The error names the flag, the path and what was expected."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=message):
        sources.user_input(str(tmp_path / path))


def test_missing_django_is_an_error_with_the_remedy(monkeypatch):
    """The preset needs an installed Django."""
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="Install it: pip install Django"):
        sources.django()


@pytest.fixture
def presets():
    """Removes after the test what it registers."""
    with sources.PRESETS.isolated():
        yield


def test_registered_source_is_read_as_a_preset(presets, tmp_path):
    """A user's function, called with the download cache, gives the corpus its entries, name and warnings."""
    caches = []

    @register_source("proverbs")
    def proverbs(cache: Path, selected: Collection[str]) -> SourceList:
        caches.append(cache)
        entry = Entry("de", "Practice makes perfect.", "Übung macht den Meister.")
        return SourceList([EntrySource("my proverbs", [entry, entry])], missing_packages=["x"])

    corpus, is_new = corpus_builder.build("proverbs", [], tmp_path / "corpus", tmp_path / "cache")
    assert is_new and caches == [tmp_path / "cache"]
    assert list(corpus.pairs("train", "de")) == [("Übung macht den Meister.", "Practice makes perfect.")]
    assert corpus.manifest["inputs"] == ["my proverbs"] and corpus.manifest["missing_packages"] == ["x"]
    assert corpus_builder.build("proverbs", [], tmp_path / "corpus", tmp_path / "cache")[1] is False


@pytest.mark.parametrize("language", ["../../etc/x", "/etc/x", "de/x", "c:de", "de\0", "deutsch", ""])
def test_language_of_a_users_source_is_checked_before_it_becomes_a_path(presets, tmp_path, language):
    """A source's own code may give any label; nothing is written outside of the corpus."""
    register_source("bad")(
        lambda cache, selected: SourceList([EntrySource("my file", [Entry(language, "a text", "ein Text")])])
    )
    with pytest.raises(UserError, match="my file: .* is not a language label"):
        corpus_builder.build("bad", [], tmp_path / "corpus", tmp_path / "cache")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "result, message",
    [
        (None, "preset 'own': the result is None; expected a SourceList"),
        ([], "preset 'own': the result is a list; expected a SourceList"),
        ([("de", "a text", "ein Text")], "source mine: an entry is a tuple; expected an Entry"),
        ([Entry("de", None, "ein Text")], "source mine: Entry.* has no two texts"),  # type: ignore[arg-type]
        ([Entry("de", "a text", 3)], "source mine: Entry.* has no two texts"),  # type: ignore[arg-type]
    ],
)
def test_what_a_preset_returns_is_checked(presets, tmp_path, result, message):
    """The message names what the user wrote."""
    register_source("own")(lambda cache, selected: SourceList([EntrySource("mine", result)]) if result else result)
    with pytest.raises(UserError, match=f"^{message}"):
        corpus_builder.build("own", [], tmp_path / "corpus", tmp_path / "cache")
    assert list(tmp_path.iterdir()) == []


def test_entries_of_every_source_are_checked():
    """A source of one's own need not be an `EntrySource`."""
    file = sources.CatalogFile("own.csv", 1, iter([("de", "a text", "ein Text")]))  # type: ignore[arg-type]
    source = types.SimpleNamespace(name="own", size=1, skipped_links=0, files=lambda: iter([file]))
    with pytest.raises(UserError, match="^source own.csv: an entry is a tuple; expected an Entry"):
        collect_pairs([source])


def test_a_preset_with_other_parameters_is_not_registered():
    with pytest.raises(UserError, match=r"^preset 'own' takes \(cache\); it is called with \(cache, selected\)"):
        register_source("own")(lambda cache: SourceList([]))


def test_unknown_preset_is_an_error_with_a_suggestion(tmp_path):
    """The error has the known presets, the nearest one and --import."""
    with pytest.raises(UserError, match="preset 'debain' is unknown. Did you mean debian?.*--import=FILE"):
        corpus_builder.build("debain", [], tmp_path / "corpus")
    assert set(sources.PRESETS.names()) == {"debian", "debian_more", "django", "none", "pocket", "pypi", "unseen"}


def test_preset_belongs_to_one_function(presets):
    """A user's file cannot replace a preset by accident."""
    with pytest.raises(UserError, match="preset 'django' is already registered"):
        register_source("django")(lambda cache, selected: SourceList([]))


def test_identity_of_entries_in_memory(tmp_path):
    """Other entries are another corpus."""
    first, second = (EntrySource("x", [Entry("de", "text", text)]) for text in ("Text", "Texte"))
    assert first.identity() == EntrySource("x", [Entry("de", "text", "Text")]).identity() != second.identity()
    assert first.size == sum(file.size for file in first.files()) == 8


@pytest.mark.parametrize(
    "given, file, language",
    [
        ("de", "de/app.po", "de"),
        ("de/app.po", "de/app.po", "de"),
        ("pt_BR/LC_MESSAGES", "pt_BR/LC_MESSAGES/app.po", "pt_BR"),
        ("de", "de/fr.po", "fr"),
        ("texts", "texts/app.po", "app"),
        ("texts", "texts/messages.po", None),
    ],
)
def test_the_name_of_the_given_directory_may_name_the_language(tmp_path, given, file, language):
    """`app` looks like a language of three letters; a directory `texts` is none."""
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text('msgid "yes"\nmsgstr "ja"\n')
    assert _read(sources.user_input(tmp_path / given)) == [(language, "ja")]


def test_a_file_is_named_once(root):
    """Before, messages named `de.tsv/de.tsv`."""
    assert [file.name for file in sources.user_input(root / "de.tsv").files()] == ["de.tsv"]
