"""Protects the catalog readers: formats agree, a corrupt file is an error that names it, and no code in a file runs."""

from __future__ import annotations

import gettext
import json
import struct
from pathlib import Path, PurePath

import polib
import pytest
from hypothesis import given, strategies

from lingvo_moe.data.corpora import catalogs
from lingvo_moe.data.corpora.catalogs import Entry
from lingvo_moe.errors import UserError

_PLURAL_FORMS = (
    "nplurals=1; plural=0;",
    "nplurals=2; plural=(n != 1);",
    "nplurals=2; plural=(n > 1);",
    "nplurals=3; plural=(n%10==1 && n%100!=11 ? 0 : n%10>=2 && n%10<=4 && (n%100<10 || n%100>=20) ? 1 : 2);",
    "nplurals=6; plural=n==0 ? 0 : n==1 ? 1 : n==2 ? 2 : n%100>=3 && n%100<=10 ? 3 : n%100>=11 ? 4 : 5;",
    "nplurals=4; plural=(n%100==1 ? 1 : n%100==2 ? 2 : n%100==3 || n%100==4 ? 3 : 0);",
    "nplurals=3; plural=(n % 10 == 0 || n % 100 >= 11 && n % 100 <= 19) ? 0 : ((n % 10 == 1 && n % 100!=11) ? 1 : 2);",
    "nplurals=2; plural=(n==1 || n%10==1 ? 0 : 1);",
    "nplurals=5; plural=(n==1 ? 0 : n==2 ? 1 : n<7 ? 2 : n<11 ? 3 : 4)",
)


def _catalog(plural_forms: str = "nplurals=2; plural=(n != 1);") -> polib.POFile:
    catalog = polib.POFile()
    catalog.metadata = {"Content-Type": "text/plain; charset=UTF-8", "Language": "de", "Plural-Forms": plural_forms}
    catalog.append(polib.POEntry(msgid="Open file", msgstr="Datei öffnen", msgctxt="menu"))
    catalog.append(
        polib.POEntry(msgid="%d file", msgid_plural="%d files", msgstr_plural={0: "%d Datei", 1: "%d Dateien"})
    )
    return catalog


def _read(path: Path) -> list[Entry]:
    return list(catalogs.read(path, PurePath(path.name)))


def test_mo_and_po_give_the_same_entries(tmp_path):
    """A catalog's compiled form has the same contexts and plural forms."""
    catalog = _catalog()
    catalog.save(str(tmp_path / "x-de.po"))
    catalog.save_as_mofile(str(tmp_path / "x-de.mo"))
    expected = {Entry("de", "Open file", "Datei öffnen"), Entry("de", "%d file", "%d Datei")}
    assert set(_read(tmp_path / "x-de.po")) == set(_read(tmp_path / "x-de.mo")) == expected


@pytest.mark.parametrize("suffix", [".po", ".mo"])
def test_the_header_has_the_language_where_the_path_has_none(tmp_path, suffix):
    """Gettext's own name of a file in a directory of one language; without a header's field, it is not known."""
    catalog, save = _catalog(), {".po": polib.POFile.save, ".mo": polib.POFile.save_as_mofile}[suffix]
    for language in ("de", None):
        if language is None:
            del catalog.metadata["Language"]
        save(catalog, str(tmp_path / f"messages{suffix}"))
        assert {entry.language for entry in _read(tmp_path / f"messages{suffix}")} == {language}


def test_fuzzy_entries_are_marked_and_obsolete_ones_skipped(tmp_path):
    """Unreviewed translations are rejected later, and counted."""
    catalog = polib.POFile()
    catalog.append(polib.POEntry(msgid="a", msgstr="b", flags=["fuzzy"]))
    catalog.append(polib.POEntry(msgid="c", msgstr="d", obsolete=True))
    catalog.save(str(tmp_path / "de.po"))
    assert _read(tmp_path / "de.po") == [Entry("de", "a", "b", fuzzy=True)]


def test_mo_in_another_encoding_and_byte_order(tmp_path):
    """Big-endian Latin-1 catalogs exist."""
    pairs = [(b"", b"Content-Type: text/plain; charset=ISO-8859-1\nLanguage: de\n"), (b"door", "Tür".encode("latin-1"))]
    (tmp_path / "de.mo").write_bytes(_mo(pairs, order=">"))
    assert _read(tmp_path / "de.mo") == [Entry("de", "door", "Tür")]


@pytest.mark.parametrize("plural_forms", _PLURAL_FORMS)
def test_plural_form_of_one_is_the_one_that_gettext_computes(plural_forms):
    """The index from the formula's text equals the index from evaluating it."""
    formula = plural_forms.partition("plural=")[2].rstrip(";")
    assert catalogs._index_of_one(plural_forms) == gettext.c2py(formula)(1)


def test_plural_formula_is_never_evaluated(tmp_path):
    """A malicious header cannot run code or take endless time."""
    _catalog("nplurals=2; plural=" + "n==1?" * 20000 + "9**9**9**9;").save_as_mofile(str(tmp_path / "de.mo"))
    assert len(_read(tmp_path / "de.mo")) == 2


def test_mo_whose_messages_overlap_is_an_error(tmp_path):
    """A small file could take all memory: each of its messages may be most of the file."""
    count, size = 1000, 2**17
    table = struct.pack(f"<{2 * count}I", *[size // 2, size // 4] * count)
    head = struct.pack("<5I", 0x950412DE, 0, count, 20, 20)
    (tmp_path / "de.mo").write_bytes((head + table).ljust(size, b"a"))
    with pytest.raises(UserError, match="not a readable .mo catalog .its messages overlap"):
        _read(tmp_path / "de.mo")


@given(strategies.binary(max_size=200), strategies.integers(0, 2**32 - 1), strategies.integers(0, 2**32 - 1))
def test_corrupt_mo_is_an_error_that_names_the_file(tmp_path_factory, tail, count, start):
    """Property: any bytes give entries, or an error with the file's name."""
    path = tmp_path_factory.mktemp("corrupt") / "de.mo"
    path.write_bytes(struct.pack("<5I", 0x950412DE, 0, count, start, start) + tail)
    try:
        assert all(isinstance(entry, Entry) for entry in _read(path))
    except UserError as error:
        assert str(error).startswith(f"{path}: not a readable .mo catalog")


def test_mo_truncated_anywhere_is_an_error(tmp_path):
    """A partly downloaded catalog is never read in part."""
    _catalog().save_as_mofile(str(tmp_path / "complete.mo"))
    data = (tmp_path / "complete.mo").read_bytes()
    path = tmp_path / "de.mo"
    for length in range(0, len(data) - 1, 7):
        path.write_bytes(data[:length])
        with pytest.raises(UserError, match="not a readable .mo catalog"):
            _read(path)


def test_po_with_many_spaces_is_read_in_linear_time(tmp_path):
    """A line of 400,000 spaces would take minutes if its end were searched from each of them."""
    path, line = tmp_path / "de.po", b'msgid "a"\nmsgstr "b' + b" " * 400_000
    path.write_bytes(line + b'c" \n')
    assert [entry.english for entry in _read(path)] == ["a"]
    path.write_bytes(line + b"c \n")
    with pytest.raises(UserError, match="line 2: expected a text in double quotes"):
        _read(path)


@pytest.mark.parametrize(
    "content", [b'msgid "a"\nmsgstr b\n', b'msgid "a"\nmsgstr ""\n"tru', b'msgid "a"\nmsgstr "\xff"\n', b"\0\1\2"]
)
def test_corrupt_po_is_an_error_that_names_the_file(tmp_path, content):
    """Missing quotes, truncation, a wrong encoding and binary data."""
    path = tmp_path / "de.po"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"de\.po: not a readable \.po catalog"):
        _read(path)


def test_mediawiki_catalog_uses_first_forms_and_the_english_beside_it(tmp_path):
    """Keys without English are skipped; the English file itself has no entries."""
    _write_json(tmp_path / "en.json", {"@metadata": {}, "n": "$1 {{PLURAL:$1|page|pages}}", "only": "English"})
    _write_json(tmp_path / "de.json", {"@metadata": {}, "n": "$1 {{PLURAL:$1|1=Seite|Seiten}}", "new": "neu"})
    assert _read(tmp_path / "de.json") == [Entry("de", "$1 page", "$1 Seite")]
    assert _read(tmp_path / "en.json") == []


def test_english_json_may_be_a_link_to_a_file_beside_it(tmp_path):
    """And to no other: that may be outside of the source."""
    (tmp_path / "in").mkdir()
    for directory in (tmp_path, tmp_path / "in"):
        (directory / "en-US.json").write_text('{"key": "yes"}', encoding="utf-8")
    (tmp_path / "in" / "de.json").write_text('{"key": "ja"}', encoding="utf-8")
    for target, count in (("en-US.json", 1), ("../en-US.json", 0)):
        (tmp_path / "in" / "en.json").unlink(missing_ok=True)
        (tmp_path / "in" / "en.json").symlink_to(target)
        assert len(list(catalogs.read(tmp_path / "in" / "de.json", PurePath("de.json")))) == count


def test_json_tree_is_read_by_the_paths_of_its_keys(tmp_path):
    """Home Assistant's translations are nested; the same key may occur in many places."""
    _write_json(tmp_path / "en.json", {"title": "Lamp", "step": {"user": {"title": "Add a lamp"}, "n": 3}})
    _write_json(tmp_path / "de.json", {"title": "Lampe", "step": {"user": {"title": "Lampe hinzufügen"}, "n": 3}})
    assert _read(tmp_path / "de.json") == [
        Entry("de", "Lamp", "Lampe"),
        Entry("de", "Add a lamp", "Lampe hinzufügen"),
    ]


@pytest.mark.parametrize(
    ("path", "language"),
    [
        ("locale/pt_BR/LC_MESSAGES/x.mo", "pt_BR"),
        ("i18n/sr-ec.json", "sr"),
        ("de.po", None),
        ("all.tsv", None),
    ],
)
def test_language_by_path_is_known_only_where_the_content_cannot_change_it(path, language):
    """A .po file's header, and the columns of a .tsv file, may name another language."""
    assert catalogs.language_by_path(PurePath(path)) == language


def test_json_may_begin_with_a_byte_order_mark(tmp_path):
    """Editors on Windows write one; .tsv and .po files may have it, too."""
    for name, text in (("en", "File"), ("de", "Datei")):
        (tmp_path / f"{name}.json").write_text(json.dumps({"a": text}), encoding="utf-8-sig")
    assert _read(tmp_path / "de.json") == [Entry("de", "File", "Datei")]


@pytest.mark.parametrize("name", ["en.json", "de.json"])
def test_a_json_key_with_two_texts_is_an_error(tmp_path, name):
    """The last one won, without a word; nobody knows which text is meant. The same text twice does no harm."""
    texts = {"en.json": '{"m": {"a": "File", "a": "File"}}', "de.json": '{"m": {"a": "Datei"}, "m": {"a": "Datei"}}'}
    for each, text in texts.items():
        (tmp_path / each).write_text(text, encoding="utf-8")
    assert _read(tmp_path / "de.json") == [Entry("de", "File", "Datei")]
    (tmp_path / name).write_text('{"m": {"a": "File", "b": "Line"}, "m": {"a": "Akte"}}', encoding="utf-8")
    with pytest.raises(UserError, match=f"{name}: not a readable JSON catalog .the key 'm.a' is there twice, with two"):
        _read(tmp_path / "de.json")


def test_a_json_object_that_is_there_twice_loses_no_text(tmp_path):
    """Its keys are those of both."""
    (tmp_path / "en.json").write_text('{"m": {"a": "File"}, "m": {"b": "Line"}}', encoding="utf-8")
    (tmp_path / "de.json").write_text('{"m": {"a": "Datei", "b": "Zeile"}}', encoding="utf-8")
    assert _read(tmp_path / "de.json") == [Entry("de", "File", "Datei"), Entry("de", "Line", "Zeile")]


def test_nested_choices():
    """PLURAL inside of GENDER is replaced from the inside out."""
    assert catalogs._first_choice("{{GENDER:$1|{{PLURAL:$2|his|their}}|her}} {{SITENAME}}") == "his {{SITENAME}}"


def test_choices_nested_without_end_take_no_time():
    """Reading each level alone takes quadratic time: 12 seconds for 140 kB."""
    assert catalogs._first_choice(50_000 * "{{PLURAL:$1|" + "a" + 50_000 * "|b}}").startswith("{{PLURAL")


def test_other_json_has_no_entries_and_invalid_json_is_an_error(tmp_path):
    """Package metadata beside catalogs is skipped."""
    _write_json(tmp_path / "en.json", {"a": "b"})
    _write_json(tmp_path / "package.json", {"name": "x"})
    _write_json(tmp_path / "fr.json", ["a list"])
    assert _read(tmp_path / "package.json") == _read(tmp_path / "fr.json") == []
    (tmp_path / "de.json").write_text('{"a": "b')
    with pytest.raises(UserError, match=r"de\.json: not a readable JSON catalog"):
        _read(tmp_path / "de.json")


def test_tsv_of_one_and_of_many_languages(tmp_path):
    """The language is in the file's name or in the first column."""
    (tmp_path / "pt-br.tsv").write_text("\ufeffolá mundo\thello world\n\n", encoding="utf-8")
    (tmp_path / "all.tsv").write_text("de\tja\tyes\r\nfr\toui\tyes\r\n", encoding="utf-8")
    assert _read(tmp_path / "pt-br.tsv") == [Entry("pt_BR", "hello world", "olá mundo")]
    assert _read(tmp_path / "all.tsv") == [Entry("de", "yes", "ja"), Entry("fr", "yes", "oui")]


@pytest.mark.parametrize(
    "content, expected",
    [
        ('"Ich kann ""so"""\tI can ""\n', ('"Ich kann ""so"""', 'I can ""')),  # one cell is not as of a spreadsheet
        ('"Ich kann ""so"""\t"I can ""so"""\r\n', ('Ich kann "so"', 'I can "so"')),
        ('\ufeff"Ich ""so"""\t"I, ""so"""', ('Ich "so"', 'I, "so"')),
        ('"zwei\nZeilen"\ttwo\n', ("zwei\nZeilen", "two")),
        ('"Ja", sagte er\t"Yes"\n', ('"Ja", sagte er', '"Yes"')),
        ('"Ja" und "Nein"\tYes and No\n', ('"Ja" und "Nein"', "Yes and No")),
        ('5" breit\t5" wide\n', ('5" breit', '5" wide')),
        ('"Ja\tYes"\n', ('"Ja', 'Yes"')),
    ],
)
def test_quotes_of_a_spreadsheet_are_removed_and_others_kept(tmp_path, content, expected):
    """Where all cells of the file with a double quote are quoted, and quotes within them doubled."""
    (tmp_path / "de.tsv").write_text(content, encoding="utf-8", newline="")
    assert [(entry.translation, entry.english) for entry in _read(tmp_path / "de.tsv")] == [expected]
    (tmp_path / "de.tsv").write_text(f'{content.rstrip()}\na "b\tc\n', encoding="utf-8", newline="")
    if "\n" not in expected[0]:
        assert _read(tmp_path / "de.tsv")[1] == Entry("de", "c", 'a "b')


def test_many_quotes_are_read_in_linear_time(tmp_path):
    """A crafted file would take time with its length's square."""
    (tmp_path / "de.tsv").write_text('"' + '""a' * 300_000 + '\n"x\t' * 1000 + "x\ty\n")
    with pytest.raises(UserError, match="de.tsv:1: 1 column"):
        _read(tmp_path / "de.tsv")


@pytest.mark.parametrize("name", ["de.tsv", "de_AT.tsv", "ast.tsv"])
def test_a_third_column_in_a_file_named_after_its_language_is_an_error_that_says_so(tmp_path, name):
    """Such files have two columns; the error is about the columns, not about a label that the user never wrote."""
    (tmp_path / name).write_text("Die Datei\tThe file\ta comment\n", encoding="utf-8")
    expected = f"{name}:1: 3 columns in a file named {name}; expected source<TAB>English. Remove the other columns"
    with pytest.raises(UserError, match=expected):
        _read(tmp_path / name)


def test_a_short_source_in_a_file_named_after_its_language_is_no_label(tmp_path):
    """German `ja` looks like the label of Japanese: English would be read as Japanese, and the comment as English."""
    (tmp_path / "de.tsv").write_text("ja\tyes\ta comment\n", encoding="utf-8")
    with pytest.raises(UserError, match="de.tsv:1: 3 columns in a file named de.tsv"):
        _read(tmp_path / "de.tsv")


@pytest.mark.parametrize("name", ["all.tsv", "own.tsv", "ui.tsv", "de.tsv", "de-fr.tsv", "news-it.tsv", "Sätze.tsv"])
def test_names_that_look_like_labels_may_have_a_column_of_languages(tmp_path, name):
    """Files of language<TAB>source<TAB>English have any other name, or that of their first language."""
    (tmp_path / name).write_text("de\tja\tyes\nfr\toui\tyes\n", encoding="utf-8")
    assert _read(tmp_path / name) == [Entry("de", "yes", "ja"), Entry("fr", "yes", "oui")]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("de.tsv", b"", "de.tsv: the file is empty"),
        ("de.tsv", b"ja\tyes\nnein no\n", "de.tsv:2: 1 columns where the first line has 2"),
        ("de.tsv", b"ja\n", "de.tsv:1: 1 column in a file named de.tsv; expected source<TAB>English"),
        ("old.tsv", b"ja\tyes\tx\ty\n", "old.tsv:1: 4 columns in a file named old.tsv; expected source<TAB>English"),
        ("old-de.tsv", b"ja\n", "old-de.tsv:1: 1 column; expected source<TAB>English in a file named LANG.tsv, or"),
        ("de.tsv", b"ja\tyes\nn\xe4\tno\n", r"de.tsv:2: not UTF-8 \(byte 2 of the line, 0xe4\)"),
        ("de.tsv", b"j\0a\tyes\n", "de.tsv:1: a NUL byte"),
        ("sentences.tsv", b"ja\tyes\n", "sentences.tsv: the file's name is not a language label"),
        ("all.tsv", b"de\tja\tyes\nklingonish\tx\ty\n", "all.tsv:2: 'klingonish' is not a language label"),
    ],
)
def test_malformed_tsv_is_an_error_with_file_and_line(tmp_path, name, content, message):
    """The user finds the line without a search."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        _read(tmp_path / name)


def _write_json(path: Path, messages):
    path.write_text(json.dumps(messages, ensure_ascii=False), encoding="utf-8")


def _mo(pairs: list[tuple[bytes, bytes]], order: str) -> bytes:
    start = 28 + 16 * len(pairs)
    tables, texts = [b"", b""], b""
    for column in (0, 1):
        for pair in pairs:
            tables[column] += struct.pack(f"{order}2I", len(pair[column]), start + len(texts))
            texts += pair[column] + b"\0"
    header = struct.pack(f"{order}7I", 0x950412DE, 0, len(pairs), 28, 28 + 8 * len(pairs), 0, start)
    return header + tables[0] + tables[1] + texts
