"""A line in capitals has a form in lower case, and a translation back in capitals; what a program reads is kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lingvo_moe.inference.capitals import lower_case, upper_case


@pytest.mark.parametrize(
    "line, expected",
    [
        ("ENREGISTRER SOUS...", "Enregistrer sous..."),
        ("«ÉCRIRE»", "«Écrire»"),
        ("СОХРАНИТЬ КАК", "Сохранить как"),
        ("DATEI %s FEHLT", "Datei %s fehlt"),
        ("%s FEHLT", "%s Fehlt"),
        ("{name}: DATEI FEHLT", "{name}: Datei fehlt"),
        ("<b>ACHTUNG</b>&nbsp;NEU", "<b>Achtung</b>&nbsp;neu"),
        ("DOSYAYI SİL", "Dosyayı sil"),
        ("3 DATEIEN", "3 dateien"),
        ("ACHTUNG! DATEI FEHLT. (WARTEN)", "Achtung! Datei fehlt. (Warten)"),
        ("VERSION 2.1 VON A.B", "Version 2.1 von a.b"),
        ("OK", "Ok"),
        ("Ok", None),
        ("X", None),
        ("%S", None),
        ("ファイル", None),
        ("セルが TRUE の場合", None),
        ("לאפשר SMB", None),
        ("3.14", None),
        ("", None),
    ],
)
def test_lines_in_capitals_have_a_form_in_lower_case(line, expected):
    assert lower_case(line) == expected


def test_what_a_program_reads_keeps_its_case():
    assert upper_case("file %s of {name} in <b>bold</b>&nbsp;type") == "FILE %s OF {name} IN <b>BOLD</b>&nbsp;TYPE"


@given(st.text("ABCÉЖ %{}s<b>&;n0.", max_size=20))
def test_capitals_come_back(line):
    """Whatever the line, both changes touch letters alone."""
    lowered = lower_case(line)
    assert lowered is None or upper_case(lowered).casefold() == line.casefold()
    assert lowered is None or lowered != line
