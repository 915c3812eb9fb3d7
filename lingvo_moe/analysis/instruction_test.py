"""Protects the sizes of results: a plan's bytes are as exact as these."""

from __future__ import annotations

import pytest

from lingvo_moe.analysis.instruction import array_bytes, instruction_of


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("f32[4,8]{1,0:T(8,128)}", 128),
        ("(bf16[3]{0}, /*index=1*/pred[3]{0})", 9),
        ("f8e4m3fn[10]", 10),
        ("f8e4m3b11fnuz[10]", 10),
        ("s4[5]", 3),
        ("u2[5]", 2),
        ("f4e2m1fn[4]", 2),
        ("c64[2]", 16),
        ("c128[2]", 32),
        ("u64[]", 8),
        ("token[]", 0),
    ],
)
def test_an_element_has_the_bits_of_its_type(text, size):
    """A last byte that is not full counts; a token has none."""
    assert array_bytes(text) == size


@pytest.mark.parametrize("text", ["x7[2]", "float[2]", "f8x[2]"])
def test_an_unknown_element_type_is_an_error(text):
    """Not four bytes: `plan` says that it cannot read the module."""
    with pytest.raises(ValueError, match="has an unknown element type"):
        array_bytes(text)


def test_a_missing_attribute_is_an_error_that_quotes_the_instruction():
    """`plan` says that it cannot read the module, and why."""
    loop = instruction_of("  %while.1 = (s32[]) while(%tuple.1), condition=%less.1")
    assert loop is not None and loop.computation("condition") == "less.1"
    with pytest.raises(ValueError, match=r"body=.* is not in the instruction's text '%tuple.1\), condition=%less.1'"):
        loop.computation("body")
