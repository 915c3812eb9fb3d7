"""Protects cleaning: markup is removed from both sides of a pair, or the pair is rejected with its reason."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given, strategies

from lingvo_moe.data.corpora import cleaning
from lingvo_moe.data.corpora.rejection import Rejection


@pytest.mark.parametrize(
    "source, english, cleaned",
    [
        ("_Datei", "_File", ("Datei", "File")),
        ("Speichern &unter", "Save &As", ("Speichern unter", "Save As")),
        ("~Bearbeiten", "E~dit", ("Bearbeiten", "Edit")),
        ("ファイル(_F)", "_File", ("ファイル", "File")),
        ("(_F) ファイル", "_File", ("ファイル", "File")),
        ("Wo ist file_name", "Lost file_name", ("Wo ist file_name", "Lost file_name")),
        ("Firma AT&T heute", "AT&T company today", ("Firma AT&T heute", "AT&T company today")),
        ("Ton &amp; Bild", "Sound &amp; vision", ("Ton &amp; Bild", "Sound &amp; vision")),
        ("a_b_c ist ein Name", "a_b_d is a name", ("a_b_c ist ein Name", "a_b_d is a name")),
        ("Öffnen", "Verb|Open", ("Öffnen", "Open")),
        ("Verb|Öffnen", "Verb|Open", ("Öffnen", "Open")),
        ("eins|zwei", "one|two", ("eins|zwei", "one|two")),
        ("Wert", "_: the context\nValue", ("Wert", "Value")),
        ("Gefahr der Pest", "?cityplague:Risk from pollution", ("Gefahr der Pest", "Risk from pollution")),
        ("Was? Das: nein", "What? This: no", ("Was? Das: nein", "What? This: no")),
        ("  zwei\n Zeilen\u00a0hier ", "two\n lines\there", ("zwei Zeilen hier", "two lines here")),
        ("\u200fשלום\u200e \u202aעולם\u202c", "hello world", ("שלום עולם", "hello world")),
        ("می\u200cخواهم", "I want", ("می\u200cخواهم", "I want")),
        ("O\u0308l", "oil", ("Öl", "oil")),
        ("%2$s von %1$s", "%1$s of %2$s", ("%2$s von %1$s", "%1$s of %2$s")),
        ("100%% fertig", "done", ("100%% fertig", "done")),
    ],
)
def test_markup_is_removed(source, english, cleaned):
    """Accelerators, contexts, invisible marks and white space; ordinary text is unchanged."""
    assert cleaning.clean(source, english) == cleaned


@pytest.mark.parametrize(
    "source, english",
    [
        ("Die Option file_name ist gesetzt", "The option file_name, if set"),
        ("Name: „file_name“ fehlt", 'The name "file_name" is missing'),
        ("Datei Bericht_2023.pdf", "File report_2023.pdf"),
        ("Der Wert von MAX_SIZE.", "The value of MAX_SIZE"),
        ("Der MAX_SIZE-Wert", "The MAX_SIZE value"),
        ("MAX_SIZEの値", "The value of MAX_SIZE"),
        ("%(file_name)sを開く", "Open %(file_name)s"),
        ("Siehe http://a.b/?x=1&y=2.", "See http://a.b/?x=1&y=2"),
        ("„$_GET“ fehlt", "$_GET is missing"),
        ('"_count" fehlt', '"_count" is missing'),
        ("Syntax von AT&T:", "AT&T syntax"),
        ("Fehler bei time_t: zu klein", "The time_t is too small"),
        ("Die Option O_DIRECT wird hier nicht unterstützt", "O_DIRECT, which is not supported here"),
        ("Die Option O_EXCL ist gesetzt", "O_EXCL is set"),
    ],
)
def test_identifiers_that_both_sides_share_keep_their_marks(source, english):
    """Also if punctuation, or a letter of a script without spaces, is beside them on one side only."""
    assert cleaning.clean(source, english) == (source, english)


@pytest.mark.parametrize("text", ["R&D department", "about ~10 MB", "the F&E-department", "from 0~10"])
def test_initials_and_approximate_numbers_keep_their_marks(text):
    """The translation need not have them."""
    assert cleaning.clean("eine Übersetzung", text) == ("eine Übersetzung", text)


@pytest.mark.parametrize(
    "source, english, cleaned",
    [
        ("H_TTPS verwenden", "Use H_TTPS", ("HTTPS verwenden", "Use HTTPS")),
        ("Immer nur H_TTPS verwenden", "Use H_TTPS", ("Immer nur HTTPS verwenden", "Use HTTPS")),
        ("Proxy H_TTPS :", "H_TTPS Proxy:", ("Proxy HTTPS :", "HTTPS Proxy:")),
        ("Quelle als S&VG", "S&VG source", ("Quelle als SVG", "SVG source")),
        ("P_osition :", "P_osition", ("Position :", "Position")),
        ("Positio&n du texte :", "Text Positio&n:", ("Position du texte :", "Text Position:")),
        ("Gut", "O&K", ("Gut", "OK")),
        ("_POST gesendet", '"_POST" was sent', ("POST gesendet", '"POST" was sent')),
    ],
)
def test_accelerators_in_a_word_that_both_sides_share_are_removed(source, english, cleaned):
    """In capitalised words and acronyms of labels; at the beginning of a word, both sides are treated alike."""
    assert cleaning.clean(source, english) == cleaned


@pytest.mark.parametrize(
    "source, english, reason",
    [
        ("", "text", Rejection.EMPTY),
        ("\u200e \n", "text", Rejection.EMPTY),
        ("Text", "", Rejection.EMPTY),
        ("15:00", "3 p.m.", Rejection.NO_LETTERS),
        ("Doppelpunkt", ":", Rejection.NO_LETTERS),
        ("GTK", "GTK", Rejection.IDENTICAL),
        ("_Name", "N_ame", Rejection.IDENTICAL),
        ("name", "Name", Rejection.IDENTICAL),
        ("eine Datei", "%d file", Rejection.PLACEHOLDERS),
        ("{name} fehlt {name}", "{name} is missing", Rejection.PLACEHOLDERS),
        ("wort " * 201, "word", Rejection.TOO_MANY_WORDS),
        ("wort", "word " * 201, Rejection.TOO_MANY_WORDS),
    ],
)
def test_unusable_pair_is_rejected_with_its_reason(source, english, reason):
    """Every reason of `clean`."""
    assert cleaning.clean(source, english) is reason


def test_two_hundred_words_are_accepted():
    """The limit is inclusive."""
    assert cleaning.clean("wort " * 200, "word " * 200) == (("wort " * 200).strip(), ("word " * 200).strip())


@pytest.mark.parametrize(
    "text, count",
    [
        ("%s of %d", 2),
        ("%(name)s", 1),
        ("%1$s", 1),
        ("%-5.2f", 1),
        ("%lu bytes", 1),
        ("%05d", 1),
        ("%0d", 1),
        ("%-0*d", 1),
        ("%00*d", 1),
        ("%H:%M", 2),
        ("%1 of %2", 2),
        ("%1.", 1),
        ("%L1", 1),
        ("%PRODUCTNAME", 1),
        ("$(ARG1)", 1),
        ("${name}", 1),
        ("$1 and $2", 2),
        ("{} {0} {x:.2f}", 3),
        ("{{SITENAME}}", 1),
        ("100%", 0),
        ("100 % of it", 0),
        ("100%.", 0),
        ("100%-ban", 0),
        ("%%", 0),
        ("a { b }", 0),
        ("5 $", 0),
    ],
)
def test_placeholders(text, count):
    """Formats of C, Python, Qt, the shell and MediaWiki; percent signs in prose are not placeholders."""
    assert cleaning.count_placeholders(text) == count


@pytest.mark.parametrize("characters", ["0", "+", "-0", ".0", "*0"])
def test_long_line_of_flags_is_read_in_linear_time(characters):
    """A corrupt line of 200,000 zeros would take many minutes if there were several ways to read them."""
    assert cleaning.count_placeholders("%" + characters * 200_000) == 0


@pytest.mark.slow
@given(strategies.text(), strategies.text())
def test_clean_text_is_one_normalised_line(source, english):
    """Property: no tab, line end, NUL or invisible mark reaches a corpus file."""
    cleaned = cleaning.clean(source, english)
    if isinstance(cleaned, Rejection):
        return
    for text in cleaned:
        assert text == " ".join(text.split()) == unicodedata.normalize("NFC", text)
        assert not set(text) & set("\t\n\r\0\u200e\u200f\ufeff")


@pytest.mark.parametrize(
    "texts, script",
    [
        (["привет", "новый GTK", "да", "OK"], "CYRILLIC"),
        (["日本", "ひらがな", "カタカナ"], "CJK"),
        (["한국어"], "HANGUL"),
        (["ja", "nein"], "LATIN"),
        (["да", "ja"], None),
        (["...", "1", "2"], None),
        ([], None),
    ],
)
def test_dominant_script(texts, script):
    """Two thirds of the texts decide; mixed languages have none."""
    assert cleaning.dominant_script(texts) == script


def test_text_needs_one_letter_of_the_script():
    """Latin product names in a Cyrillic text are accepted."""
    assert cleaning.is_written_in("GTK и X11", "CYRILLIC")
    assert not cleaning.is_written_in("GTK 3", "CYRILLIC")
