"""A catalog's texts become English or another language, whatever they hold; reviewed translations and all else stay."""

from __future__ import annotations

import polib
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lingvo_moe.errors import UserError
from lingvo_moe.inference.po_catalog import PoCatalog

_TEXT = r"""# A header
msgid ""
msgstr ""
"Project-Id-Version: brew 1.0\n"
"Language: de\n"
"Content-Type: text/plain; charset=ISO-8859-1\n"
"Plural-Forms: nplurals=1; plural=0;\n"

#. of the menu
#: main.c:12
#, c-format
msgctxt "menu"
msgid "%d Datei\n"
msgid_plural "%d Dateien\n"
msgstr[0] ""

msgid "Beenden"
msgstr "Leave"

#, fuzzy
#| msgid "Schliessen"
msgid "Schließen"
msgstr "Shut"

msgid "„Ja“ \"%s\"\tC:\\neu"
msgstr ""

#~ msgid "Alt"
#~ msgstr "Old"
"""


def _catalog(tmp_path, text: str, encoding: str = "utf-8", language: str = "") -> PoCatalog:
    path = tmp_path / "de.po"
    path.write_text(text, encoding=encoding)
    return PoCatalog(path, language)


def test_what_lacks_a_reviewed_translation_is_a_sentence(tmp_path):
    """Of both forms of a plural; special characters are the escapes that lines of `translate` have."""
    text = _TEXT.replace("ISO-8859-1", "UTF-8")
    catalog = _catalog(tmp_path, text)
    assert catalog.sentences == [r"%d Datei\n", r"%d Dateien\n", "Schließen", r"„Ja“ \"%s\"\tC:\\neu"]
    lines = [text.splitlines()[number - 1] for number in catalog.line_numbers]
    assert [line.partition(" ")[0] for line in lines] == ["#.", "#.", "#,", "msgid"]


def test_translations_are_filled_in_and_all_else_stays(tmp_path):
    """English has two plural forms, and the text is UTF-8; a doubtful form marks its entry as fuzzy."""
    catalog = _catalog(tmp_path, _TEXT.replace("„Ja“", "«Ja»"), "iso-8859-1")
    filled = catalog.filled([r"%d file\n", r"%d files\n", "Close", r"Yes \"%s\"\tC:\\neu"], {1})
    found = polib.pofile(filled)
    assert found.metadata["Language"] == "en" and found.metadata["Project-Id-Version"] == "brew 1.0"
    assert found.metadata["Plural-Forms"] == "nplurals=2; plural=(n != 1);" and "charset=UTF-8" in str(found.metadata)
    plural, reviewed, closed, escaped = (entry for entry in found if not entry.obsolete)
    assert plural.msgstr_plural == {0: "%d file\n", 1: "%d files\n"} and plural.flags == ["c-format", "fuzzy"]
    assert plural.msgctxt == "menu" and plural.comment == "of the menu" and plural.occurrences == [("main.c", "12")]
    assert reviewed.msgstr == "Leave" and closed.msgstr == "Close" and not closed.flags and not closed.previous_msgid
    assert escaped.msgstr == 'Yes "%s"\tC:\\neu' and escaped.msgid == '«Ja» "%s"\tC:\\neu'
    assert found.header == "A header" and [entry.msgstr for entry in found.obsolete_entries()] == ["Old"]


@pytest.mark.parametrize("flag, expected", [("", ["One file", "%d files"]), ("#, fuzzy\n", ["%d file", "%d files"])])
def test_a_plural_form_that_is_there_is_kept(tmp_path, flag, expected):
    """Someone has translated one form; what is fuzzy nobody has."""
    text = f'{flag}msgid "%d Datei"\nmsgid_plural "%d Dateien"\nmsgstr[0] "One file"\nmsgstr[1] ""\n'
    (entry,) = polib.pofile(_catalog(tmp_path, text).filled(["%d file", "%d files"], ()))
    assert list(entry.msgstr_plural.values()) == expected


def test_a_template_without_a_header_gets_one(tmp_path):
    """xgettext --omit-header writes none; its encoding is UTF-8."""
    found = polib.pofile(_catalog(tmp_path, 'msgid "Grün"\nmsgstr ""\n').filled(["Green"], ()))
    assert found.metadata["Content-Type"] == "text/plain; charset=UTF-8" and found[0].msgstr == "Green"


@pytest.mark.parametrize(
    "forms, language, expected",
    [
        ("nplurals=1; plural=0;", "jpn_Jpan", ["%d files\n"]),
        ("nplurals=2; plural=(n > 1);", "fra_Latn", ["%d file\n", "%d files\n"]),
        ("nplurals=3; plural=(n%10==1 ? 0 : 1);", "__ru__", ["%d file\n", "%d files\n", "%d files\n"]),
    ],
)
def test_a_catalog_of_another_language_keeps_its_header(tmp_path, forms, language, expected):
    """Its language and plural forms; those that English lacks are copies of the plural, and someone must read them."""
    text = _TEXT.replace("Language: de", "Language: xx").replace("nplurals=1; plural=0;", forms)
    catalog = _catalog(tmp_path, text.replace("ISO-8859-1", "UTF-8"), language=language)
    found = polib.pofile(catalog.filled([r"%d file\n", r"%d files\n", "Close", "Yes"], ()))
    assert found.metadata["Language"] == "xx" and found.metadata["Plural-Forms"] == forms
    assert [found[0].msgstr_plural[form] for form in sorted(found[0].msgstr_plural)] == expected
    assert found[0].fuzzy == (len(expected) != 2) and not found[2].fuzzy


@pytest.mark.parametrize("header", ["", '"Plural-Forms: nplurals=INTEGER; plural=EXPRESSION;\\n"\n'])
def test_a_template_is_of_the_language_of_its_translations(tmp_path, header):
    """Its plural forms are not known, so that English ones stand for them, and someone must read the entry."""
    text = f'msgid ""\nmsgstr ""\n{header}\nmsgid "Datei"\nmsgid_plural "Dateien"\nmsgstr[0] ""\nmsgstr[1] ""\n'
    found = polib.pofile(_catalog(tmp_path, text, language="fra_Latn").filled(["fichier", "fichiers"], ()))
    assert found.metadata["Language"] == "fra" and found.metadata["Plural-Forms"] == "nplurals=2; plural=(n != 1);"
    assert found[0].msgstr_plural == {0: "fichier", 1: "fichiers"} and found[0].fuzzy


def test_translations_of_an_earlier_catalog_are_kept(tmp_path):
    """Someone has corrected them; fuzzy ones, and those of another context, are made again.

    What the input itself has is replaced; entries that it lacks become obsolete ones, as those with another context.
    """
    made = _TEXT.replace("ISO-8859-1", "UTF-8")
    reviewed = polib.pofile(_catalog(tmp_path, made).filled(["%d file", "%d files", "Close", "Yes"], {3}))
    reviewed.find("Schließen").msgstr = "Close it"
    reviewed.find("Schließen").tcomment = "so says the style guide"
    reviewed.find("%d Datei\n").msgctxt = "window"
    reviewed.find("Beenden").msgstr = "Quit"
    reviewed.metadata |= {"Last-Translator": "Ann", "Language": "en_GB", "Project-Id-Version": "old"}
    reviewed.metadata["Content-Type"] = "text/plain; charset=windows-1252"  # what is written is UTF-8
    reviewed.encoding = "windows-1252"
    reviewed.save(str(tmp_path / "en.po"))
    catalog = PoCatalog(tmp_path / "de.po", earlier=tmp_path / "en.po")
    assert catalog.entries_kept == 2 and catalog.sentences == [r"%d Datei\n", r"%d Dateien\n", r"„Ja“ \"%s\"\tC:\\neu"]
    reviewed.find('„Ja“ "%s"\tC:\\neu').flags.clear()  # while the command runs
    reviewed.save(str(tmp_path / "en.po"))
    written = polib.pofile(catalog.filled(["%d file", "%d files", "Oh yes"], ()))
    kept = written.find("Schließen")
    assert kept.msgstr == "Close it" and kept.tcomment == "so says the style guide" and not kept.flags
    assert written.find("Beenden").msgstr == "Quit" and written.find('„Ja“ "%s"\tC:\\neu').msgstr == "Yes"
    assert written.metadata["Last-Translator"] == "Ann" and written.metadata["Language"] == "en_GB"
    assert written.metadata["Project-Id-Version"] == "brew 1.0" and "UTF-8" in written.metadata["Content-Type"]
    assert {entry.msgid for entry in written.obsolete_entries()} == {"Alt", "%d Datei\n"}
    again = PoCatalog(tmp_path / "de.po", earlier=tmp_path / "en.po").filled(["%d file", "%d files"], ())
    (tmp_path / "en.po").write_text(again, encoding="utf-8")
    assert PoCatalog(tmp_path / "de.po", earlier=tmp_path / "en.po").filled([], ()) == again


def test_an_obsolete_translation_is_used_again(tmp_path):
    """Its text was removed, and is there again; half a plural is kept, too."""
    (tmp_path / "en.po").write_text(
        '#~ msgid "Ja"\n#~ msgstr "Yes"\n\nmsgid "%d Tag"\nmsgid_plural "%d Tage"\nmsgstr[0] "One day"\nmsgstr[1] ""\n'
    )
    (tmp_path / "de.po").write_text(
        'msgid "Ja"\nmsgstr ""\n\nmsgid "%d Tag"\nmsgid_plural "%d Tage"\nmsgstr[0] ""\nmsgstr[1] ""\n'
    )
    catalog = PoCatalog(tmp_path / "de.po", earlier=tmp_path / "en.po")
    assert catalog.entries_kept == 1 and catalog.sentences == ["%d Tag", "%d Tage"]
    written = polib.pofile(catalog.filled(["%d day", "%d days"], ()))
    assert written.find("Ja").msgstr == "Yes" and written.find("%d Tag").msgstr_plural == {0: "One day", 1: "%d days"}


@pytest.mark.parametrize(("forms", "is_fuzzy"), [(["%d day", "%d day"], True), (["%d day", "%d days"], False)])
def test_equal_forms_of_a_plural_are_fuzzy(tmp_path, forms, is_fuzzy):
    """Japanese has one text for both, whose translation is that of one thing."""
    text = 'msgid "%d 日"\nmsgid_plural "%d 日"\nmsgstr[0] ""\n'
    (entry,) = polib.pofile(_catalog(tmp_path, text).filled(forms, ()))
    assert entry.fuzzy == is_fuzzy


@pytest.mark.parametrize(("language", "expected"), [("de", "de"), ("en_GB", ""), ("", "")])
def test_translations_of_the_input_into_another_language_are_named(tmp_path, language, expected):
    text = f'msgid ""\nmsgstr "Language: {language}\\n"\n\nmsgid "File"\nmsgstr "Datei"\n'
    assert _catalog(tmp_path, text).other_language == expected


def test_translations_into_another_language_are_not_replaced(tmp_path):
    """They would be lost."""
    (tmp_path / "fr.po").write_text(
        'msgid ""\nmsgstr "Language: fr\\n"\n\nmsgid "Ja"\nmsgstr "Oui"\n', encoding="utf-8"
    )
    with pytest.raises(UserError, match=r"fr\.po exists and has translations into fr, not en, which would be lost"):
        (tmp_path / "de.po").write_text(_TEXT.replace("ISO-8859-1", "UTF-8"), encoding="utf-8")
        PoCatalog(tmp_path / "de.po", earlier=tmp_path / "fr.po")


@given(st.text(st.characters(codec="utf-8"), min_size=1))
def test_any_text_returns_as_it_was(tmp_path_factory, text):
    """A sentence is one line, and a copy of it becomes the text again."""
    made = polib.POFile()
    made.append(polib.POEntry(msgid=text))
    directory = tmp_path_factory.mktemp("catalog")
    catalog = _catalog(directory, str(made))
    (sentence,) = catalog.sentences
    assert "\n" not in sentence
    (directory / "en.po").write_text(catalog.filled([sentence], ()), encoding="utf-8")
    (entry,) = polib.pofile(str(directory / "en.po"))
    assert entry.msgstr == entry.msgid == text


@pytest.mark.parametrize(
    "text",
    [
        'msgid "Datei\nmsgstr ""\n',
        "Datei\n",
        'msgstr "x"\nmsgstr "y"\n',
        'msgid "Ja"\nmsgstr ""\n\nmsgid "Datei"\n',
        'msgid "Ja"\nmsgid_plural "Jas"\n# cut\n',
    ],
)
def test_what_is_no_catalog_is_named(tmp_path, text):
    with pytest.raises(UserError, match=r"de\.po: not a readable \.po catalog .*msgfmt --check"):
        _catalog(tmp_path, text)
