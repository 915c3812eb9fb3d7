"""Letters that are written as entities or escapes become letters; what a program reads stays."""

from __future__ import annotations

import pytest

from lingvo_moe.inference.lines.written_letters import decode


@pytest.mark.parametrize(
    "line, expected",
    [
        ("L&ouml;schen &amp; schlie&szlig;en", "Löschen &amp; schließen"),
        ("l&#246;schen, l&#xf6;schen", "löschen, löschen"),
        (r"Gr\u00f6\u00dfe \u20ac", r"Größe \u20ac"),
        (r"C:\\u00f6 &nosuch; &#9999999; a & b; \u12", r"C:\\u00f6 &nosuch; &#9999999; a & b; \u12"),
        (r"\ud83d\ude00 &lt;b&gt; &hellip;", r"\ud83d\ude00 &lt;b&gt; &hellip;"),
    ],
)
def test_letters_are_decoded(line, expected):
    """Signs, halves of pairs (surrogates), and a backslash that has one before it are no letters."""
    assert decode(line) == expected
