"""Accelerator marks are removed; identifiers, names, addresses and entities keep their underscores and ampersands."""

from __future__ import annotations

import numpy as np
import pytest

from lingvo_moe.data.tokenizer import Tokenizer
from lingvo_moe.inference.accelerators import without_accelerator


class _Tokenizer(Tokenizer):
    """A word has one piece; any other text has a piece for each letter."""

    def encode(self, texts):
        words = {"abbrechen", "speichern", "entity", "id", "enregistrer"}
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
        ("Speichern _unter…", "Speichern unter…"),
        ("ファイル(_F)", "ファイル"),
        ("파일 열기 (&O)", "파일 열기"),
        ("entity_id fehlt", "entity_id fehlt"),
        ("Dienste von AT&T", "Dienste von AT&T"),
        ("von http://a.de/ab_brechen laden", "von http://a.de/ab_brechen laden"),
        ("array_2d: Zeile", "array_2d: Zeile"),
        ("Tom & Jerry", "Tom & Jerry"),
        ("a&nbsp;b", "a&nbsp;b"),
        ("__init__", "__init__"),
        ("", ""),
        ("_", "_"),
    ],
)
def test_the_mark_of_an_accelerator_is_removed(text, expected):
    assert without_accelerator(text, _Tokenizer(b"")) == expected
