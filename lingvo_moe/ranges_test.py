"""Protects hyperparameters from numbers that no program can use."""

from __future__ import annotations

import dataclasses
import math
import types
from typing import Any

import numpy as np
import pytest

from lingvo_moe import ranges
from lingvo_moe.errors import UserError


@pytest.mark.parametrize(
    "allowed, inside, outside, text",
    [
        (ranges.ABOVE_0, (1e-30, 2.0), (0.0, -1.0), "a number above 0"),
        (ranges.SHARE, (0, 1, 0.5), (-0.1, 1.1), "at least 0 and at most 1"),
        (ranges.SHARE_BELOW_1, (0, 0.999), (1.0,), "at least 0 and below 1"),
        (ranges.COUNT, (1, 2**31 - 1), (0, -3, 2**31), "at least 1 and at most 2,147,483,647"),
        (ranges.Range(2), (2, 1e9), (1,), "at least 2"),
    ],
)
def test_a_field_out_of_its_range_is_an_error(allowed, inside, outside, text):
    """With the name of --set, the value and what was expected; none of these has NaN or infinity."""
    for value in inside:
        ranges.check("model.", types.SimpleNamespace(field=value), {"field": allowed})
    for value in (*outside, math.nan, math.inf, -math.inf):
        with pytest.raises(UserError) as raised:
            ranges.check("model.", types.SimpleNamespace(field=value), {"field": allowed})
        assert str(raised.value) == f"model.field is {value}; expected {text}."


def test_a_text_in_the_place_of_a_number_is_an_error():
    """A command reads numbers from texts, Python does not."""
    with pytest.raises(UserError, match="^model.field is '8', of type str; expected at least 1 and at most "):
        ranges.check("model.", types.SimpleNamespace(field="8"), {"field": ranges.COUNT})
    for value in (np.int64(8), np.float32(8)):
        ranges.check("model.", types.SimpleNamespace(field=value), {"field": ranges.COUNT})


@dataclasses.dataclass(frozen=True)
class _Owner:
    required: int = 1
    optional: float | None = 1.0


def test_a_field_is_none_only_where_its_type_says_so():
    """`search.beam_size=None`, from Python, would fail far inside."""
    allowed = dict.fromkeys(("required", "optional"), ranges.COUNT)
    ranges.check("search.", _Owner(optional=None), allowed)
    none: Any = None
    with pytest.raises(UserError, match="^search.required is None; expected at least 1 and at most "):
        ranges.check("search.", _Owner(required=none), allowed)
    ranges.check("--", types.SimpleNamespace(required=None), {"required": ranges.COUNT})


def test_a_count_has_no_fraction():
    """A command reads whole numbers, Python takes what it is given, and half a layer would fail far inside."""
    with pytest.raises(UserError, match="^model.field is 8.5; expected a whole number, at least 1 and at most "):
        ranges.check("model.", types.SimpleNamespace(field=8.5), {"field": ranges.COUNT})
    ranges.check("model.", types.SimpleNamespace(field=8.5), {"field": ranges.Range(1)})


@pytest.mark.parametrize("value", [1e39, -1e39, 1e-39])
def test_a_number_that_float32_does_not_have_is_an_error(value):
    """Programs would compute with infinity, or with zero."""
    allowed = ranges.Range(-math.inf)
    assert 0 in allowed and 3e38 in allowed and 2e-38 in allowed
    with pytest.raises(UserError, match="expected .*, and 0 or from 1.2e-38 to 3.4e38 in float32."):
        ranges.check("", types.SimpleNamespace(field=value), {"field": allowed})


def test_a_range_may_have_infinity():
    """But neither minus infinity nor NaN."""
    allowed = ranges.Range(exclusive_minimum=True, infinite=True)
    assert math.inf in allowed and 5.0 in allowed
    for value in (0.0, -math.inf, math.nan):
        with pytest.raises(UserError, match="field is .*; expected a number above 0, or inf."):
            ranges.check("", types.SimpleNamespace(field=value), {"field": allowed})
