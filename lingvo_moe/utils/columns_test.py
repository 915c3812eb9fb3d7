"""Tables of text are aligned."""

from __future__ import annotations

from lingvo_moe.utils.columns import aligned

_ROWS = [("name", "weights", "state"), ("m4.Small", "12", ""), ("x", "1,234,567", "whole")]


def test_numbers_are_aligned_on_the_right():
    assert aligned(_ROWS) == [
        "name        weights  state",
        "m4.Small         12",
        "x         1,234,567  whole",
    ]


def test_text_is_aligned_on_the_left():
    assert aligned(_ROWS, has_numbers=False) == [
        "name      weights    state",
        "m4.Small  12",
        "x         1,234,567  whole",
    ]
