"""What a translation is required to keep, and what only looks like it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lingvo_moe.inference.lines.kept_text import (
    breaks_a_pair,
    count_required,
    has_words,
    in_english,
    required,
    with_english_numbers,
)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("%s: %-5.2f von %(count)d, %1$s", ["%s", "%-5.2f", "%(count)d", "%1$s"]),
        ("%1 und %2", ["%1", "%2"]),
        (
            "{name} {0} {{count}} ${amount} $(ARG1) @user@",
            ["{name}", "{0}", "{{count}}", "${amount}", "$(ARG1)", "@user@"],
        ),
        ("ページ$1に移動, $1ın, $HOMEé", ["$1", "$1", "$HOME"]),
        ("%d%% fertig, 100%%ig", ["%d", "%%", "100", "%%"]),
        ("{n, number, percent} am {d,date, short}", ["{n, number, percent}", "{d,date, short}"]),
        ("%[1]d von %[2].2f, %<name>s, %<breit", ["%[1]d", "%[2].2f", "%<name>s"]),
        ("{n, plurall, one {# Datei}}", ["{n, plurall,"]),
        ("{rot, grün, blau} und {rot, grün}", []),
        ("{ $name } hat { NUMBER($n) } { -brand-name }", ["{ $name }", "{ NUMBER($n) }", "{ -brand-name }"]),
        ("{% if x %}Ja{% endif %} { ja }", ["{% if x %}", "{% endif %}"]),
        ("Mail an a@b.de oder https://a.de/%s", ["a@b.de", "https://a.de/%s"]),
        ('<b>Fett</b>, <br>, <br/>, <img src="a">', ["<b>", "</b>", "<br>", "<br/>", '<img src="a">']),
        ("<B>Fett</b>", ["<B>", "</b>"]),
        ('<font color="red">rot', ['<font color="red">']),
        ("%1%2", ["%1", "%2"]),
        ("%PRODUCTNAME öffnen", ["%PRODUCTNAME"]),
    ],
)
def test_placeholders_addresses_and_markup_are_required(text, expected):
    assert [each[0] for each in required(text)] == expected


@pytest.mark.parametrize(
    "text, expected",
    [
        ("£15, £ 1.299,00, 5 ₽ und ￥500", ["£15", "£ 1.299,00", "5 ₽", "￥500"]),
        ("±3°, § 7, a ≠ b, ≥ 10", ["±3", "§ 7", "≠", "≥ 10"]),
        ("20 µs, 5μm, in µm, 8 µmol", ["20 µs", "5μm", "µm"]),
        ("5 €, 3 $, a + b = c", []),
        ("--force, --no-x=3, -k, a--b, ---", ["--force", "--no-x"]),
    ],
)
def test_signs_micro_units_and_options_are_required(text, expected):
    """A model makes other signs, milliseconds and other words of them."""
    assert [each[0] for each in required(text)] == expected


def test_signs_are_counted_however_they_are_written():
    """The wide yen and the two signs for micro are one each."""
    assert count_required("￥500, 1.234,5 ₽, 20 µs") == count_required("¥500, 1,234.5₽, 20 μs")
    assert count_required("£15") != count_required("15") != count_required("20 ms") != count_required("20 µs")


@pytest.mark.parametrize(
    "text, translation, expected",
    [
        ("Preis: 1.299,00 €", "Price: 1.299,00 €", "Price: 1,299.00 €"),
        ("合計: 12,800円", "Total: 12.800 yen", "Total: 12,800 yen"),
        ("1.000.000 Einträge", "1.000,000 entries", "1,000,000 entries"),
        ("Prix : 1 299,90 €", "Price: 1 299.90 €", "Price: 1,299.90 €"),
        ("7,500 Zeilen", "7.500 rows", "7.500 rows"),
        ("%50 tamamlandı", "%50 complete", "50% complete"),
        ("Version 1.299, 00", "version 1.299, 00", "version 1.299, 00"),
        ("7,5 von 1.000", "7,5 of 1.000", "7,5 of 1.000"),
        ("%50 von 150 %", "150% of %50", "150% of 50%"),
        ("%1 und %2", "%1 and %2", "%1 and %2"),
    ],
)
def test_unambiguous_numbers_are_written_in_english(text, translation, expected):
    """A point, or a comma, by itself may be that of a version, a list or another language."""
    assert with_english_numbers(text, translation) == expected


@pytest.mark.parametrize("text", ["[0,1]", "(1,2)", "{1,2}"])
def test_pairs_in_brackets_are_no_decimal_numbers(text):
    assert in_english(text) == text and in_english(f"{text[:-1]}5") != f"{text[:-1]}5"


@pytest.mark.parametrize(
    "text, numbers",
    [
        ("Super+<Nummer>", []),
        ("%50 indirim", ["50"]),
        ("%5 veya %10", ["10"]),
        ("100%ig und 50%em", ["100", "50"]),
        ("5 % Rabatt, 100 %", ["100"]),
        ("5%ig", []),
        ("Appliquer&nbsp;: l&#8217;image", []),
        ('Zeile\\n und \\"Wort\\"', []),
        ("a < b > c, {} offen {", ["{}"]),
        ("", []),
    ],
)
def test_percentages_names_entities_and_escapes_are_not(text, numbers):
    """A translation may write them in another way, or translate them; but it has the number of a percentage."""
    assert [each[0] for each in required(text)] == numbers


@pytest.mark.parametrize(
    "text, expected",
    [
        ("Die Datei „Bericht_2023.pdf“ und отчёт.xlsx.", ["Bericht_2023.pdf", "отчёт.xlsx"]),
        ("文件report.pdf打开", ["report.pdf"]),
        ("mit Node.js auf db.example.com:3306", ["Node.js", "db.example.com:3306"]),
        ("z.B. t.ex. p.ej. f.eks. m.in. d.h. usw. Ende.Neu", []),
        ("Tel.nr. der Nutzer.innen, beendet.bitte", []),
        (r"DOMAIN\robert, HKEY_USERS\x, %APPDATA%\temp", [r"DOMAIN\robert", r"HKEY_USERS\x", r"%APPDATA%\temp"]),
        (r"\\server\nutzer\a, FEHLER\nDatei, \textbf{x}", [r"\\server\nutzer\a", r"\textbf", "{x}"]),
        ("in /etc/hosts, ~/x oder ../a/b.c", ["/etc/hosts", "~/x", "../a/b.c"]),
        ("km/h, /Nein, и/или, http", []),
        (r"nach C:\Program Files\App\neu.exe kopieren", [r"C:\Program Files\App\neu.exe"]),
        ("`git commit -m` statt `%s' und `Wort'", ["`git commit -m`", "%s"]),
        ("a_user_name, MAX_SIZE, x86_64 und utf_8", ["a_user_name", "MAX_SIZE", "x86_64", "utf_8"]),
        ("__init__, __mein_modul__(), __FILE__ und __Datei", ["__init__", "__mein_modul__", "__FILE__"]),
        ("__Datei__", ["__Datei__"]),  # bold
        ("<!-- Datei --> öffnen <!-- <b> -->", ["<!-- Datei -->"]),
        ("Er_setzen, user_name", []),  # with an accelerator, perhaps
        ("0xDEADBEEF, 00:1A:2b:3C:4d:5E", ["0xDEADBEEF", "00:1A:2b:3C:4d:5E"]),
        ("550e8400-e29b-41d4-a716-446655440000", ["550e8400-e29b-41d4-a716-446655440000"]),
        ("d41d8cd98f00b204 ist kein deadbeef", ["d41d8cd98f00b204"]),
        ("am 2022-11-22 22:12:02, Version 1.11.2", ["2022-11-22", "22:12:02", "1.11.2"]),
        ("1.234,5 von 10 000, H264 mit 10MB", ["1.234,5", "10 000", "H264", "10MB"]),
        ("1 Datei in 2 Ordnern", []),
        ("2023年12月25日, tháng 12, Tháng 11", ["2023", "25"]),
    ],
)
def test_codes_paths_and_numbers_are_required(text, expected):
    assert [each[0] for each in required(text)] == expected


@pytest.mark.parametrize(
    "one, other, are_equal",
    [
        ("1.234,5", "1,234.5", True),
        ("10 000", "10,000", True),
        ("7500", "7,500", True),
        ("12,5 %", "12.5%", True),
        ("10MB", "10 MB", True),
        ("1 234 567,89", "1,234,567.89", True),
        ("1234,567", "1,234.567", True),
        ("10.30", "10:30", True),
        ("12.03.2024", "12/03/2024", True),
        ("1,5", "15", False),
        ("1,0", "10", False),
        ("١٢٣", "123", True),
        ("١٬٢٣٤٫٥", "1,234.5", True),
        ("١٫٥", "15", False),
        ("11.2", "1.1.2", False),
        ("1048576", "148576", False),
        ("22:12:02", "22:1202", False),
        ("1.234,50", "1.234.50", False),
        ("12,345,67", "12,345.67", False),
        ("1.234.567,8", "1,234,567.8", True),
        ("1 234.567,8", "1,234,567.8", False),
        ("1.234.50", "1.234.50", True),
    ],
)
def test_separators_of_a_number_may_differ(one, other, are_equal):
    """Languages have other ones than English, but none changes digits, a version or a time."""
    assert (count_required(one) == count_required(other)) == are_equal


@pytest.mark.parametrize(
    "text, translation, is_lost",
    [
        ('"Ja";"Nein"', '"Yes";"', True),
        ("„Ja“", '"Yes"', False),
        ("„Ja“", 'Yes"', True),
        ('Ein 5" Bildschirm', 'A 5" screen', False),
        ('Ein 5" Bildschirm', "A 5-inch screen", False),
        ("**Datei** öffnen", "Open **file*", True),
        ("{ LEN($x) } Dateien", "LEN($x) } files", True),
        ("Datei {", "File {", False),
        ("｛名前｝", "{name}", False),
    ],
)
def test_an_unpaired_quote_or_brace_is_a_lost_one(text, translation, is_lost):
    """Quotes of another form are the translation's own, and an inch may be a word."""
    assert breaks_a_pair(text, translation) == is_lost


@pytest.mark.parametrize(
    "text", ["<b>12</b>", "%s: {name}", "a@b.de, /etc/hosts", "10MB", "25 KB", "-3 °C", "&nbsp;", "—", ""]
)
def test_a_text_without_words(text):
    assert not has_words(text) and has_words(f"{text} Datei") and has_words(f"D {text}")


@given(st.text("aA1./\\:_`~-% <>&;@$'{},", max_size=30))
def test_any_text_has_matches_in_order(text):
    """They do not overlap, and counting takes each of them once."""
    found = required(text)
    assert all(one.end() <= other.start() for one, other in itertools.pairwise(found))
    assert sum(count_required(text).values()) == len(found)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("0,05", "0.05"),
        ("1.234,5", "1,234.5"),
        ("1,234", "1,234"),
        ("1,2,3", "1,2,3"),
        ("۱۲٫۵ MB", "12.5 MB"),
        ("٣٫١٤ و ١٬٢٣٤٫٥", "3.14 و 1,234.5"),
        ("١٬٢٣٤", "1,234"),
        ("٬٫ a٫b", "٬٫ a٫b"),
        ("a,b", "a,b"),
    ],
)
def test_numbers_in_english(text, expected):
    """A comma before three digits may be one between groups; one of several is no decimal comma."""
    assert in_english(text) == expected


def test_a_long_text_takes_no_longer_than_its_length():
    """A search that starts again at each character would take minutes."""
    for repeated in (
        "1",
        "1,",
        "1 000",
        r"\\a",
        "ABC\\",
        "%a%\\",
        "a_1",
        "_",
        "-0",
        "a.a0",
        "/a",
        "`a",
        "00:",
        "aa.aa",
        "{n,n,",
        "{%",
        "__a",
        "<!--a",
    ):
        assert count_required(20_000 * repeated + "月") is not None and has_words(20_000 * repeated) is not None
