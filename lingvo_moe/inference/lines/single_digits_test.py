"""A digit that stands alone is found in the text, and in the ways that English writes it."""

from __future__ import annotations

import pytest

from lingvo_moe.inference.lines import single_digits


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Batterie 4", ["4"]),
        ("Mittlere Last (5 Min.), Phase 2:", ["5", "2"]),
        ("平均负载（1 分钟）", ["1"]),
        ("2つのファイル, H2 und 3D, 4-fach", []),
        ("1 234 Zeilen, 5,6 oder 7:30 Uhr", []),
        ("`tar -v 3` und <b id=4>", []),
        ("Schritt 5 von 12", ["5"]),
    ],
)
def test_digits_that_stand_alone_are_found(text, expected):
    assert [found[0] for found in single_digits.find(text)] == expected


@pytest.mark.parametrize(
    ("text", "translation", "is_lost"),
    [
        ("Batterie 4", "Firebrick4", True),
        ("Batterie 4", "Battery 4", False),
        ("5. Stufe", "5th level", False),
        ("8 Bytes", "8-byte number", False),
        ("Seite 3 oder 3", "Page 3", True),
        ("Version 2", "Version 2,5", True),
        ("Ein Byte", "1 byte", False),
        ("Ziffer ٣", "Digit 3", False),
    ],
)
def test_lost_digits_are_found(text, translation, is_lost):
    assert single_digits.loses_one(text, translation) == is_lost
