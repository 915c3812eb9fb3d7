"""The texts of messages in ICU's format, and that the rest of a message stays as it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lingvo_moe.inference.lines.icu_messages import divide


@pytest.mark.parametrize(
    "line, texts",
    [
        ("{count, plural, one {# Datei} other {# Dateien}}", ["", "# Datei", "# Dateien", ""]),
        ("{n,selectordinal,=0{}few {{a} b}other{c}}", ["", "", "{a} b", "c", ""]),
        ("{n, plural, offset:1 one {'{'a'}'} other {l’{b}}}", ["", "'{'a'}'", "l’{b}", ""]),
        (
            " Von {n, plural, one {# Datei} other {# Dateien}} gelesen. ",
            [" ", "Von # Datei gelesen.", "Von # Dateien gelesen.", " "],
        ),
        ("A\t{g, select, male {Er} other {Sie}}", ["A\t", "Er", "Sie", ""]),
        ("{a, select, x {X {b, select, y {Y} other {Z}} W} other {V}}", ["", "X ", "Y", "Z", " W", "V", ""]),
        ("{a, select, other {X}}, {b, select, other {Y}} Z", ["", "X", ", ", "Y", " Z"]),
        ("{count} von {name, number}", ["{count} von {name, number}"]),
        ("{a, plural, one {b} other {c}", ["{a, plural, one {b} other {c}"]),
        ("{a, plural, one {b}} {c, plural, d", ["{a, plural, one {b}} {c, plural, d"]),
        ("", [""]),
    ],
)
def test_texts_of_arguments(line, texts):
    """A sentence around a single argument goes into its texts; what is no complete message is one text."""
    assert divide(line)[::2] == texts


@given(st.lists(st.sampled_from(["{a, plural,", " one {", "other{", "}", "}}", "{b}", "'", "x ", "#"]), max_size=12))
def test_nothing_of_a_message_is_lost(pieces):
    """Whatever the braces; what is around an argument is either where it was, or in all of its texts."""
    line = "".join(pieces)
    divided = divide(line)
    assert len(divided) % 2 == 1
    if "".join(divided) != line:
        before, after = line.split(divided[1])[0].lstrip(), line.rpartition(divided[-2])[2].rstrip()
        assert any(map(str.isalpha, before + after))
        assert all(text.startswith(before) and text.endswith(after) for text in divided[2:-1:2])


def test_a_long_line_takes_no_longer_than_its_length():
    """A search that starts again at each brace would take minutes."""
    for repeated in ("{a,plural,one{", "{a,plural,", "{", "'{", "{a,select,b{}}", "{a,", "{a, select, x {y} } "):
        assert divide(20_000 * repeated)
