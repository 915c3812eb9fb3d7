"""Protects help pages: paragraphs of two languages are paired by id or by order, and other pages have no pairs."""

from __future__ import annotations

import bz2
from pathlib import Path, PurePath

import pytest

from lingvo_moe.data.corpora import catalogs, help_pages
from lingvo_moe.data.corpora.catalogs import Entry
from lingvo_moe.data.corpora.sources import CatalogDirectory
from lingvo_moe.errors import UserError

_HTML = """<html><head><title>x</title></head><body><p>no id</p>
<h1 id="hd_id1"><a name="x"></a>{title}</h1>
<p id="par_id2">{text} {switch}+S<br>or {switch}+T.</p><p id="par_id2">{text} all.</p>
{more}</body></html>"""
_SWITCH = (
    '<span class="switchinline"><span hidden="true" id="MAC_1"><span class="emph">Cmd</span></span>'
    '<span hidden="true" id="default_1"><span class="emph">Ctrl</span></span></span>'
)
_MALLARD = """<page xmlns="http://projectmallard.org/1.0/" id="x" xml:lang="{language}"><info><desc>{desc}</desc>
<credit type="author"><name>N. N.</name></credit></info><title>{title}</title><!-- a comment -->
<steps><item><p>{text} <guiseq><gui>A</gui><gui>B</gui></guiseq>, <keyseq><key>Ctrl</key><key>S</key></keyseq>.</p>
</item></steps>{more}</page>"""


# A page of a KDE manual: contents, authors, a heading and a term with anchors of their own, and a numbered anchor.
_MANUAL = """<FILENAME filename="{page}.html"><html><body>
<div class="toc"><dl><dt><a href="#x">{title} 1</a></dt></dl></div><div class="list-of-tables"><dt>{title} 2</dt></div>
<p class="author"><span>N. N.</span></p><p class="copyright">{title} 3</p>{before}
<h2><a name="{page}"></a>{title}</h2><p>{text} <b>all</b>.</p><a name="id{number}"></a><p>{text} one.</p>
<a name="ftn.x{number}"></a><p>{text} two.</p>
<dl><dt><a name="{page}-term"></a>{term}</dt><dd><p>{text} it.</p></dd></dl>{more}</body></html></FILENAME>"""


def _write(root: Path, name: str, text: str) -> PurePath:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text, encoding="utf-8")
    return PurePath(name)


def _read(root: Path, name: PurePath) -> list[Entry]:
    entries = catalogs.read(root / name, name)
    return [Entry(e.language, *(" ".join(text.split()) for text in (e.english, e.translation))) for e in entries]


def test_html_paragraphs_are_paired_by_id(tmp_path):
    """A paragraph that one page lacks is skipped; of the alternatives in a paragraph, the default one is read."""
    english = _HTML.format(title="Saving", text="Press", switch=_SWITCH, more='<p id="par_id3">New.</p>')
    german = _HTML.format(title="Speichern", text="Drücken Sie", switch=_SWITCH, more='<p id="par_id4">Alt.</p>')
    english_name = _write(tmp_path, "libreoffice/help/en-US/text/a.html", english)
    name = _write(tmp_path, "libreoffice/help/pt-BR/text/a.html", german)
    assert _read(tmp_path, name) == [
        Entry("pt_BR", "Saving", "Speichern"),
        Entry("pt_BR", "Press Ctrl+S or Ctrl+T.", "Drücken Sie Ctrl+S or Ctrl+T."),
        Entry("pt_BR", "Press all.", "Drücken Sie all."),
    ]
    assert _read(tmp_path, english_name) == []


def test_mallard_paragraphs_are_paired_by_order(tmp_path):
    """Menus and keys have separators; names of authors are no paragraphs."""
    english = _MALLARD.format(language="en", desc="About it.", title="Saving", text="Choose", more="")
    german = _MALLARD.format(language="de", desc="Darüber.", title="Speichern", text="Wählen Sie", more="")
    _write(tmp_path, "help/C/app/x.page", english)
    name = _write(tmp_path, "help/de/app/x.page", german)
    assert _read(tmp_path, name) == [
        Entry("de", "About it.", "Darüber."),
        Entry("de", "Saving", "Speichern"),
        Entry("de", "Choose A > B, Ctrl+S.", "Wählen Sie A > B, Ctrl+S."),
    ]


def _write_manual(root: Path, language: str, *pages: str) -> PurePath:
    name = PurePath(f"share/doc/HTML/{language}/app/index.cache.bz2")
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(bz2.compress("".join(pages).encode()))
    return name


_ENGLISH_FIELDS = {"title": "Saving", "text": "Save", "term": "File"}
_TRANSLATED_FIELDS = {"title": "Speichern", "text": "Speichern Sie", "term": "Datei"}


def _page(page: str, number: int, translated: bool = False, before: str = "", more: str = "") -> str:
    fields = _TRANSLATED_FIELDS if translated else _ENGLISH_FIELDS
    return _MANUAL.format(page=page, number=number, before=before, more=more, **fields)


def test_sections_of_a_manual_are_paired_by_order(tmp_path):
    """A section with other paragraphs has no pairs but its heading; wherever it is, other sections are not shifted."""
    english_name = _write_manual(
        tmp_path,
        "en",
        _page("a", 1),
        _page("b", 2, before="<p>First.</p>", more="<p>new</p>"),
        _page("c", 3, before="<h1>C</h1>"),
    )
    name = _write_manual(
        tmp_path,
        "pt_BR",
        _page("new", 1, True),
        _page("c", 2, True, before="<p>old</p>"),
        _page("b", 3, True, before="<p>Zuerst.</p>"),
    )
    start = [Entry("pt_BR", "First.", "Zuerst.")]
    section = [Entry("pt_BR", f"Save {word}.", f"Speichern Sie {word}.") for word in ("all", "one", "two")]
    heading = [Entry("pt_BR", "Saving", "Speichern")]
    term = [Entry("pt_BR", "File", "Datei")]
    rest = [Entry("pt_BR", "Save it.", "Speichern Sie it.")]
    assert _read(tmp_path, name) == start + heading + section + term + heading + section + term + rest
    assert _read(tmp_path, english_name) == []


@pytest.mark.parametrize(
    "english, translated, count",
    [
        ("<p>Figure 3.2 shows it.</p>", "<p>Das zeigt Abbildung 3.2.</p>", 1),
        ("<p>Figure 3.2 shows it.</p>", "<p>Das zeigt Abbildung 2.1.</p>", 0),
        ("<p>Write to nobody@example.org.</p>", "<p>Schreiben Sie an nobody@example.org.</p>", 0),
        ("<p>The first one.</p><p>The picture.</p>", "<p>Das Bild.</p><p></p>", 2),
        (f"<p>{'Long text. ' * 5}</p><p>Next.</p>", "<p></p><p>Weiter.</p>", 0),
        (f"<p>{'Long text. ' * 9}</p><p>Next.</p>", "<p>Kurz.</p><p>Weiter.</p>", 0),
        ("<h1>Question?</h1><div class='qandaset'><dl><dt>Question?</dt></dl><p>So.</p></div>", None, 2),
    ],
)
def test_shifted_and_useless_texts_of_a_manual_are_not_read(tmp_path, english, translated, count):
    """Equal tags in equal order may still be of different texts; numbers of figures change with the version."""
    _write_manual(tmp_path, "en", f'<FILENAME filename="a.html"><html><body>{english}</body></html>')
    text = f'<FILENAME filename="a.html"><html><body>{translated or english}</body></html>'
    assert len(_read(tmp_path, _write_manual(tmp_path, "de", text))) == count


@pytest.mark.parametrize("content", [b"no archive", bz2.compress(b'<FILENAME filename="a"><p>\xff</p>')])
def test_damaged_manual_is_an_error_that_names_the_file(tmp_path, content):
    """As an interrupted unpacking may leave it, or another encoding."""
    _write_manual(tmp_path, "en", _page("a", 1))
    name = _write_manual(tmp_path, "de")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=r"de/app/index\.cache\.bz2: not a readable help page \(.*Get a new copy"):
        _read(tmp_path, name)


def test_mallard_page_with_other_paragraphs_has_no_pairs(tmp_path):
    """A translation of an older page would pair the wrong paragraphs from some line on."""
    fields = {"desc": "d", "title": "t", "text": "p"}
    _write(tmp_path, "help/C/app/x.page", _MALLARD.format(language="en", more="<p>new</p>", **fields))
    name = _write(tmp_path, "help/de/app/x.page", _MALLARD.format(language="de", more="", **fields))
    assert _read(tmp_path, name) == []


@pytest.mark.parametrize("name", ["help/de/app/x.page", "help/x.page", "de/app/x.page", "x.html", "help/de/x.html"])
def test_page_without_an_english_page_has_no_pairs(tmp_path, name):
    """Other files with these suffixes are in packages, too."""
    _write(tmp_path, name, "<page/>")
    assert _read(tmp_path, PurePath(name)) == []


@pytest.mark.parametrize("link", ["help/C", "help/C/x.page"])
def test_link_out_of_the_source_is_not_read_as_the_english_page(tmp_path, link):
    """A link inside a package must not pull other files of the machine into a corpus; one inside of it may be read."""
    text = _MALLARD.format(language="en", desc="d", title="t", text="p", more="")
    for target, count in ((tmp_path / "outside" / "C", 0), (tmp_path / "inside" / "elsewhere", 3)):
        root = tmp_path / "inside"
        _write(target, "x.page", text)
        name = _write(root, "help/de/x.page", text)
        (root / link).parent.mkdir(parents=True, exist_ok=True)
        (root / link).unlink(missing_ok=True)
        (root / link).symlink_to(target if link == "help/C" else target / "x.page")
        assert len(_read(root, name)) == count


def test_entities_are_not_resolved(tmp_path):
    """A page cannot read other files, or grow without limit."""
    (tmp_path / "secret").write_text("secret")
    declaration = f'<!DOCTYPE page [<!ENTITY x SYSTEM "{tmp_path}/secret"><!ENTITY y "secret too">]>'
    page = '<page xmlns="http://projectmallard.org/1.0/"><p>a &x; &y; b</p></page>'
    _write(tmp_path, "help/C/x.page", declaration + page)
    name = _write(tmp_path, "help/de/x.page", declaration + page)
    assert "secret" not in str(_read(tmp_path, name))


@pytest.mark.parametrize("content", ["", " ", "<!-- nothing -->"])
def test_empty_html_is_an_error_that_names_the_file(tmp_path, content):
    """As an interrupted unpacking may leave it."""
    _write(tmp_path, "help/en-US/x.html", _HTML.format(title="t", text="t", switch="", more=""))
    name = _write(tmp_path, "help/de/x.html", content)
    with pytest.raises(UserError, match=r"help/de/x\.html: not a readable help page \(.*Get a new copy, or remove it"):
        _read(tmp_path, name)


def test_pages_are_not_read_as_catalogs_of_a_user(tmp_path):
    """Only sources that ask for help pages read them."""
    _write(tmp_path, "help/C/x.page", "<page/>")
    _write(tmp_path, "help/de/x.page", "<page>")
    assert not list(CatalogDirectory("texts", tmp_path).files())
    assert len(list(CatalogDirectory("texts", tmp_path, help_pages.SUFFIXES).files())) == 2


def test_malformed_page_is_an_error_that_names_the_file(tmp_path):
    """With the parser's reason and the remedy."""
    _write(tmp_path, "help/C/x.page", "<page/>")
    name = _write(tmp_path, "help/de/x.page", "<page><p>no end")
    with pytest.raises(UserError, match=r"help/de/x\.page: not a readable help page \(.*Get a new copy, or remove it"):
        _read(tmp_path, name)


@pytest.mark.parametrize(
    "name, language",
    [
        ("a/help/pt-BR/text/x.html", "pt_BR"),
        ("help/sr@latin/app/x.page", "sr_Latn"),
        ("doc/HTML/zh_CN/app/index.cache.bz2", "zh_Hans"),
        ("doc/HTML/de/app/changes.bz2", None),
        ("de/x.page", None),
    ],
)
def test_language_is_the_folder_below_help(name, language):
    """The files of other languages than those asked for are not read."""
    assert help_pages.language(PurePath(name)) == catalogs.language_by_path(PurePath(name)) == language
