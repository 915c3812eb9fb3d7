"""The text of a flag becomes a value of the field's type, or an error that says what was expected."""

from __future__ import annotations

import pytest

from lingvo_moe.errors import UserError
from lingvo_moe.ranges import Range
from lingvo_moe.utils import field_values


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("7", int, 7),
        ("1e-3", float, 1e-3),
        ("Yes", bool, True),
        ("0", bool, False),
        ("none", str, "none"),
        ("None", int | None, None),
        ("2", float | None, 2.0),
    ],
)
def test_a_text_is_a_value_of_the_type(text, kind, value):
    found = field_values.parse("x", text, kind)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("1.5", int, "a whole number"),
        ("none", int, "a whole number"),
        ("fast", float | None, "a number"),
        ("maybe", bool, "true or false"),
    ],
)
def test_another_text_is_an_error_that_begins_with_what_was_written(text, kind, message):
    with pytest.raises(UserError, match=f"^--set x=y: expected {message}"):
        field_values.parse("--set x=y", text, kind)


def test_other_types_are_read_by_the_caller():
    """Without `| None`; a type that nobody reads is an error."""
    assert field_values.parse("x", "a", list | None, lambda *given: given) == ("x", "a", list)
    with pytest.raises(UserError, match="^x: a field of this type cannot be set by a flag"):
        field_values.parse("x", "a", list | None)


@pytest.mark.parametrize(
    ("text", "number"),
    [("8", 8), ("64", 64), ("7", None), ("65", None), ("-8", None), ("8.0", None), ("²", None), ("9" * 5000, None)],
)
def test_a_whole_number_is_in_its_range(text, number):
    """Python raises an error for thousands of digits; here they are out of range as others."""
    assert field_values.whole_number(text, Range(8, 64)) == number
