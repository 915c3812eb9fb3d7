"""A line in capitals has a form in lower case, and a translation back in capitals; what a program reads is kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lingvo_moe.inference.lines.capitals import lower_cases, upper_case


@pytest.mark.parametrize(
    "line, expected",
    [
        ("ENREGISTRER SOUS...", ["Enregistrer sous..."]),
        ("«ÉCRIRE»", ["«Écrire»"]),
        ("СОХРАНИТЬ КАК", ["Сохранить как"]),
        ("DATEI %s FEHLT", ["Datei %s fehlt"]),
        ("%s FEHLT", ["%s Fehlt"]),
        ("{name}: DATEI FEHLT", ["{name}: Datei fehlt"]),
        ("<b>ACHTUNG</b>&nbsp;NEU", ["<b>Achtung</b>&nbsp;neu"]),
        ("DOSYAYI SİL", ["Dosyayı sil"]),
        ("İPTAL ET", ["İptal et"]),
        ("Nº DE SÉRIE", ["Nº de série"]),
        ("1ª PÁGINA", ["1ª página"]),
        ("GROßE DATEI", ["Große datei"]),
        ("ПІДʼЄДНАНО", ["Підʼєднано"]),
        (r"DATEI\nFEHLT", [r"Datei\nfehlt"]),
        ("ᏣᎳᎩ ᎦᏬᏂ", []),
        ("𝐀𝐁", []),
        ("3 DATEIEN", ["3 dateien"]),
        ("ACHTUNG! DATEI FEHLT. (WARTEN)", ["Achtung! Datei fehlt. (Warten)"]),
        ("VERSION 2.1 VON A.B", ["Version 2.1 von a.b"]),
        ("OK", ["Ok"]),
        ("Ok", []),
        ("X", []),
        ("%S", []),
        ("ファイル", []),
        ("セルが TRUE の場合", []),
        ("לאפשר SMB", []),
        ("3.14", []),
        ("", []),
    ],
)
def test_lines_in_capitals_have_a_form_in_lower_case(line, expected):
    assert lower_cases(line)[:1] == expected


@pytest.mark.parametrize(
    "line, expected",
    [
        ("YAZICI YOK", ["Yazici yok", "Yazıcı yok"]),
        ("ÇIKIŞ", ["Çikiş", "Çıkış"]),
        ("IŞIK", ["Işik", "Işık"]),
        ("PRINT QUEUE", ["Print queue"]),
        ("DRUCKER FEHLT", ["Drucker fehlt"]),
        ("IMPORTAÇÃO", ["Importação"]),
    ],
)
def test_a_line_that_may_be_turkish_is_read_with_a_dotless_i_too(line, expected):
    assert lower_cases(line) == expected


def test_what_a_program_reads_keeps_its_case():
    assert (
        upper_case(r"file %s of {name} in <b>bold</b>&nbsp;type\n") == r"FILE %s OF {name} IN <b>BOLD</b>&nbsp;TYPE\n"
    )


@given(st.text("ABCÉЖIİĞßºǄ %{}s<b>&;n0.\\\\@", max_size=20))
def test_capitals_come_back(line):
    """Whatever the line, both changes touch letters alone."""
    for lowered in lower_cases(line):
        assert upper_case(lowered).replace("İ", "I") == upper_case(line).replace("İ", "I")
        assert lowered != line
