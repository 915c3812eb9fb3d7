"""A line is divided at what is copied, and comes back unchanged if its texts do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lingvo_moe.inference.lines.line_parts import LineParts, Wrapped, divide


@pytest.mark.parametrize(
    "line, texts",
    [
        (r"Dateien werden kopiert\nOrdner werden angelegt", ["Dateien werden kopiert", "Ordner werden angelegt"]),
        ("  -v, --verbose         ausführliche Ausgabe", ["-v, --verbose", "ausführliche Ausgabe"]),
        ("Name            Größe   Datum", ["Name", "Größe", "Datum"]),
        ("Start › Programme › Zubehör", ["Start", "Programme", "Zubehör"]),
        ("Ein Satz.  Noch einer", ["Ein Satz.  Noch einer"]),
        ("‹Datei› öffnen", ["‹Datei› öffnen"]),
    ],
)
def test_labels_columns_and_menus_are_divided(line, texts):
    """A model would move words from one to the other, and lose the columns."""
    divided = divide(line)
    assert [wrapped.text for wrapped in divided.texts] == texts
    assert divided.around(texts) == line


@pytest.mark.parametrize(
    "line, texts, between",
    [
        ("Datei öffnen", ["Datei öffnen"], ["", ""]),
        ("  Datei  öffnen ", ["Datei  öffnen"], ["  ", " "]),
        ("Datei\tOrdner\t12\tGröße\r", ["Datei", "Ordner", "Größe"], ["", "\t", "\t12\t", "\r"]),
        (r"Zeile\n  Zeile\n\n", ["Zeile", "Zeile"], ["", r"\n  ", r"\n\n"]),
        (r"Kopieren\tStrg+C", ["Kopieren", "Strg+C"], ["", r"\t", ""]),
        (r"Datei {name}\tGröße", ["Datei {name}", "Größe"], ["", r"\t", ""]),
        (r"C:\neu\test fehlt, a\\nb", [r"C:\neu\test fehlt, a\\nb"], ["", ""]),
        (r"DOMAIN\robert auf \\server\neu", [r"DOMAIN\robert auf \\server\neu"], ["", ""]),
        ("int main();", ["int main();"], ["", ""]),
        ('<a\thref="x">Datei</a>', ['<a\thref="x">Datei</a>'], ["", ""]),
        ("Kennwort ;", ["Kennwort"], ["", " ;"]),
        ("Datei;\tKennwort ;", ["Datei;", "Kennwort"], ["", "\t", " ;"]),
        ("Τι είναι;", ["Τι είναι;"], ["", ""]),
        ("Datei&nbsp;", ["Datei&nbsp;"], ["", ""]),
        ("<keine Auswahl>", ["<keine Auswahl>"], ["", ""]),
        ("%s: 12;", [""], ["%s: 12;", ""]),
        (" ", [""], [" ", ""]),
        ("", [""], ["", ""]),
    ],
)
def test_white_space_escapes_and_parts_without_words_are_copied(line, texts, between):
    assert divide(line) == LineParts([Wrapped(text) for text in texts], between)


@pytest.mark.parametrize(
    "line, text, translation, expected",
    [
        (
            r"Die Datei konnte nicht\ngeöffnet werden.",
            "Die Datei konnte nicht geöffnet werden.",
            "a b c d",
            r"a b c\nd",
        ),
        (r"Die Datei\nwurde nicht gefunden.", "Die Datei wurde nicht gefunden.", "a b c d", r"a b\nc d"),
        (r"Wilt u het bestand \nverwijderen?", "Wilt u het bestand verwijderen?", "a b c", r"a b \nc"),
        (
            r"Soll die eben im linken Fenster ausgewählte\nDatei ganz\nweg?",
            "Soll die eben im linken Fenster ausgewählte Datei ganz weg?",
            "aa bb cc dd ee ff gg",
            r"aa bb cc dd ee\nff\ngg",
        ),
        (r"選択したファイルを\n削除", "選択したファイルを削除", "delete", "delete"),
    ],
)
def test_a_wrapped_sentence_is_translated_as_a_whole(line, text, translation, expected):
    """Its line ends are put at the spaces that are nearest to where they were, if there are enough of them."""
    divided = divide(line)
    assert [wrapped.text for wrapped in divided.texts] == [text] and divided.between == ["", ""]
    assert divided.around([translation]) == expected


@pytest.mark.parametrize(
    "line",
    [
        r"Erste Zeile\nZweite Zeile",
        r"Ende.\ndanach",
        r"„Das ist das Ende der Datei.“\ndanach",
        r"(Das ist das Ende der Datei!)\nDanach",
        r"Liste der Dateien hier\n- eine",
        r"Fehler beim Lesen:\nder Datei",
        r"Alle Dateien hierin\nDatei",
        r"一二三四五六七\n八",
    ],
)
def test_other_line_ends_separate(line):
    """After the end of a sentence, before an item of a list, and between short titles."""
    assert len(divide(line).texts) == 2


@pytest.mark.parametrize(
    "line, texts, translated",
    [
        (
            "Noch {n, plural, one {# Minute} other {# Minuten}}",
            ["Noch %d Minute", "Noch %d Minuten"],
            "{n, plural, one {NOCH # MINUTE} other {NOCH # MINUTEN}}",
        ),
        ("{a, plural, one {#%d x}other{}}", ["#%d x"], "{a, plural, one {#%D X}other{}}"),
        ("{a, plural, one {#} other {}}", [""], "{a, plural, one {#} other {}}"),
        ("# Titel", ["# Titel"], "# TITEL"),
    ],
)
def test_the_number_of_a_plural_form_is_read_as_in_other_programs(line, texts, translated):
    """`#` of ICU as `%d`, which corpora have; elsewhere it is another character."""
    divided = divide(line)
    assert [text.text for text in divided.texts] == texts
    assert (
        divided.around(
            [text.text.upper().replace("%D", "%d" if text.has_number_sign else "%D") for text in divided.texts]
        )
        == translated
    )


def test_numbers_without_words_are_those_of_english():
    """There is nothing to translate, but digits and a decimal comma are of the language."""
    assert divide("0,05\t١٢\t1.234,5 %\t10 MB\t1,2,3").between == ["0.05\t12\t1,234.5 %\t10 MB\t1,2,3", ""]


def test_numbers_stay_where_translations_are_not_in_english():
    """French and German write them as the line does."""
    assert divide("0,05\t١٢\t1.234,5 %", numbers_in_english=False).between == ["0,05\t١٢\t1.234,5 %", ""]


@given(st.text("aä1 ;\t\r\\\\ntu%s<>&\u2028Τ", max_size=20))
def test_every_line_comes_back(line):
    """Its texts have no separators at their ends, so that nothing is lost when they are tidied."""
    divided = divide(line)
    texts = [wrapped.text for wrapped in divided.texts]
    assert divided.around(texts) == line
    assert all(text == text.strip() for text in texts)


def test_a_long_line_takes_no_longer_than_its_length():
    """A search that starts again at each character would take minutes."""
    for repeated in (" ", " a", r"\n", ";", " ;", "\t", "a\t", "&a;", r"a\n", r"a \na", "A\\"):
        line = 20_000 * repeated
        assert divide(line).between
