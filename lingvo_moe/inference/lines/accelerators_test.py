"""Accelerator marks are removed; identifiers, names, addresses and entities keep their underscores and ampersands."""

from __future__ import annotations

import numpy as np
import pytest

from lingvo_moe.data.tokenizer import Tokenizer
from lingvo_moe.inference.lines.accelerators import without_accelerator


class _Tokenizer(Tokenizer):
    """A word has one piece; any other text has a piece for each letter."""

    def encode(self, texts):
        words = {"abbrechen", "speichern", "entity", "id", "enregistrer", "user", "name", "username"}
        return [np.zeros(1 if text.lower() in words else len(text), np.int32) for text in texts]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("_Datei öffnen", "Datei öffnen"),
        ("Datei ö&ffnen (&lt;)", "Datei ö&ffnen (&lt;)"),  # two marks
        ("~Tabelle", "Tabelle"),
        ('"_Datei" laden', '"Datei" laden'),
        ("Ab_brechen", "Abbrechen"),
        ("ENRE&GISTRER", "ENREGISTRER"),
        ("ABB&RECHEN", "ABBRECHEN"),
        ("AB&BRECHEN", "AB&BRECHEN"),  # perhaps a name
        ("Speichern _unter…", "Speichern unter…"),
        ("ファイル(_F)", "ファイル"),
        ("파일 열기 (&O)", "파일 열기"),
        ("entity_id fehlt", "entity_id fehlt"),
        ("user_name", "username"),
        ("xyz_uvw", "xyz_uvw"),  # as many pieces as its halves
        ("Ein neuer User_name", "Ein neuer Username"),
        ('"user_name" fehlt', '"user_name" fehlt'),
        ("Die Spalte user_name fehlt.", "Die Spalte user_name fehlt."),
        ("Den Vorgang jetzt ab_brechen", "Den Vorgang jetzt abbrechen"),
        ("Dienste von AT&T", "Dienste von AT&T"),
        ("von http://a.de/ab_brechen laden", "von http://a.de/ab_brechen laden"),
        ("array_2d: Zeile", "array_2d: Zeile"),
        ("AT&T", "AT&T"),
        ("DIENSTE VON AT&T", "DIENSTE VON AT&T"),
        ("MAX_SIZE", "MAX_SIZE"),
        ("_E-Mail senden", "E-Mail senden"),
        ("Annulla l'_azione", "Annulla l'azione"),
        ("_Ein/Aus", "Ein/Aus"),
        ("_फ़ाइल", "फ़ाइल"),
        ("(_N)", "(N)"),
        ("malloc(&p) fehlt", "malloc(&p) fehlt"),
        ("Funktion f(_x) und g", "Funktion f(_x) und g"),
        ("Tom & Jerry", "Tom & Jerry"),
        ("a&nbsp;b", "a&nbsp;b"),
        ("__init__", "__init__"),
        ("", ""),
        ("_", "_"),
    ],
)
def test_the_mark_of_an_accelerator_is_removed(text, expected):
    assert without_accelerator(text, _Tokenizer(b"")) == expected


@pytest.mark.parametrize(
    "word",
    [
        "{file_name}",
        "{_count}",
        "{&x}",
        "$file_name",
        "${user_name}",
        "%{user_name}",
        "$(file_name)",
        "%file_name%",
        "<file_name>",
        "@user_name@",
        "--file_name",
        "a/_b/c",
        "%(file_name)s",
        "&_",
        "x@user_name.de",
    ],
)
def test_what_a_program_reads_keeps_its_underscore(word):
    """Even if all words have one piece."""

    class OnePiece(Tokenizer):
        def encode(self, texts):
            return [np.zeros(1, np.int32) for _ in texts]

    assert without_accelerator(f"Datei {word} fehlt", OnePiece(b"")) == f"Datei {word} fehlt"
