"""A list of fields stays one with as many; sentences, code and markup are none."""

from __future__ import annotations

import pytest

from lingvo_moe.inference.lines import field_lists


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Name;Größe;Typ", ["Name", "Größe", "Typ"]),
        ("Mo|Di|Mi", ["Mo", "Di", "Mi"]),
        ("Mo|Di;Mi", []),
        ("Bild;Foto machen;jpg", ["Bild", "Foto machen", "jpg"]),
        ("Ja;Nein", []),
        ("Erst öffnen; dann lesen; dann schließen", []),
        ("Müller &amp; Söhne;Preis;Menge", []),
        ("SUMME(a;b;c)", []),
        ("a;;c", []),
        ("", []),
    ],
)
def test_fields_are_found(text, expected):
    found = field_lists.divide(text)
    assert (found.fields if found else []) == expected


@pytest.mark.parametrize(
    ("text", "translation", "is_lost"),
    [
        ("Name;Größe;Typ", "Name;Size;Type", False),
        ("Name;Größe;Typ", "Name;Size", True),
        ("Name;Größe;Typ", "Name;Size;Type;Kind", True),
        ("Name;Größe;Typ", "Name; ;Type", True),
        ("Ja;Nein", "Yes", False),
        ("Mo|Di|Mi", "Mon|Tue|", True),
    ],
)
def test_lost_fields_are_found(text, translation, is_lost):
    assert field_lists.loses_a_field(text, translation) == is_lost
