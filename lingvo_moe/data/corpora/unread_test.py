"""Protects the warnings about a user's files that no reader takes: none of them is missing without a word."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lingvo_moe.data.corpora import corpus_builder, sources, unread
from lingvo_moe.errors import UserError


def _write(root: Path, *names: str):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text({".tsv": "ja\tyes\n", ".json": '{"a": "yes"}'}.get(path.suffix, "x"), encoding="utf-8")


def test_files_of_other_formats_are_counted_with_an_example(tmp_path):
    """A quarter of a user's pairs was in such files. JSON that is not named after its language is not read, either."""
    _write(tmp_path / "app", "de.tsv", "values-de/strings.xml", "values-fr/strings.xml", "de.xliff", "DE.TSV")
    _write(tmp_path / "app", "locales/de/common.json")
    assert unread.warnings([tmp_path / "app"]) == [
        "5 files of other formats were not read: .xml 2, .TSV 1, .json 1, .xliff 1, such as app/DE.TSV. Convert them "
        "to .po or .tsv (docs/own_texts.md)."
    ]


@pytest.mark.parametrize(
    "name",
    ".git/x.xml .x.xml sub/.idea/x.xml README README.txt LICENSE.txt a.md b.png x.pot c.py package.json qqq.json "
    "en.json de.json x.po x.mo".split(),
)
def test_what_is_read_or_obviously_no_catalog_is_no_reason_to_warn(tmp_path, name):
    """Hidden files, documentation, pictures, code and templates are in many directories."""
    _write(tmp_path, "en.json", name)
    assert unread.warnings([tmp_path]) == []


def test_json_without_english_is_named(tmp_path):
    """Its keys alone are no English; the other catalogs are read."""
    _write(tmp_path / "app", "de.tsv", "fr.json")
    expected = "app/fr.json: there is no en.json beside it, which has the English texts by the same keys"
    assert unread.warnings([tmp_path / "app"]) == [f"{expected}; not read. Add that file."]
    _write(tmp_path / "app", "sub/it.json", "sub/nl.json")
    more = "; not read. Add that file."
    assert unread.warnings([tmp_path / "app"]) == [f"{expected}, nor beside 2 more files{more}"]


def test_links_out_of_the_input_and_pipes_are_named(tmp_path):
    """A link whose target was moved looks like a catalog in a listing."""
    _write(tmp_path, "fr.tsv", "app/es.tsv")
    (tmp_path / "app" / "de.tsv").symlink_to("nowhere")
    os.mkfifo(tmp_path / "app" / "it.tsv")
    (tmp_path / "app" / "pt.tsv").symlink_to("es.tsv")
    assert unread.warnings([tmp_path / "app"]) == [
        "not read, as a pipe, or a link to nothing or out of the input: app/de.tsv and 1 more. Put a copy there."
    ]
    (tmp_path / "app" / "sv.tsv").symlink_to(tmp_path / "fr.tsv")
    assert "app/de.tsv and 2 more" in unread.warnings([tmp_path / "app"])[0]


def test_an_input_that_is_named_twice_is_counted_once(tmp_path):
    """The splits may share a directory's name."""
    _write(tmp_path, "x.xml")
    assert unread.warnings([tmp_path, str(tmp_path), tmp_path / "sub" / ".."])[0].startswith("a file of another format")


@pytest.mark.parametrize(
    "path, message",
    [
        ("", "^nothing to build a corpus from: lone/fr.json: there is no en.json beside it, .*Add that file.$"),
        ("fr.json", "^--input=.*fr.json: there is no en.json beside it, which .*. Add that file.$"),
        ("texts.json", "^--input=.*texts.json: expected a name after its language, such as de.json. Rename the file.$"),
        ("sub", "^--input=.*sub: no .tsv, .po, .mo or .json file in it, or only empty ones; a file of another format"),
    ],
)
def test_nothing_but_unread_files_is_an_error_that_names_them(tmp_path, path, message):
    """It said that the inputs had no translations into another language than English."""
    _write(tmp_path / "lone", "fr.json")
    if path not in ("", "fr.json"):
        _write(tmp_path / "lone", "texts.json", "sub/x.xml")
    with pytest.raises(UserError, match=message):
        corpus_builder.build("none", [tmp_path / "lone" / path], tmp_path / "corpus")


def test_files_of_a_preset_are_no_reason_to_warn(tmp_path):
    """A package has thousands of files that are no catalogs."""
    _write(tmp_path / "package", "de.tsv", "fr.json", "x.xml")

    with sources.PRESETS.isolated():
        sources.register_source("own")(
            lambda cache, selected: sources.SourceList([sources.CatalogDirectory("x", tmp_path / "package")])
        )
        corpus, _ = corpus_builder.build("own", [], tmp_path / "corpus", tmp_path / "cache")
    assert corpus.manifest["unread_files"] == []
