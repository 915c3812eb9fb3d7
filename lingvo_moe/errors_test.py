"""Suggestions are the words that a mistyped one is near to, as they are spelt, and nothing where none is near."""

from __future__ import annotations

import pytest

from lingvo_moe.errors import UserError, did_you_mean


@pytest.mark.parametrize(
    "word, said",
    [
        ("trian", " Did you mean train?"),
        ("TRAIN", " Did you mean train?"),
        ("m4.quikstart", " Did you mean m4.Quickstart?"),
        ("xyzzy", ""),
        ("", ""),
    ],
)
def test_near_words_are_named_as_they_are_spelt(word, said):
    assert did_you_mean(word, ["train", "m4.Quickstart", "eval"]) == said


def test_no_more_than_the_limit_nearest_first():
    assert (
        did_you_mean("layer", ["bayern", "layered", "layers", "player1"], limit=2) == " Did you mean layers, player1?"
    )


def test_a_user_error_is_a_value_error():
    """So that code which guards against bad values need not know of ours."""
    assert issubclass(UserError, ValueError)
