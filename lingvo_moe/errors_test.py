"""A suggestion is the known word most similar to a mistyped one, in its own spelling; there may be none."""

from __future__ import annotations

import pytest

from lingvo_moe.errors import UserError, did_you_mean


@pytest.mark.parametrize(
    "word, suggestion",
    [
        ("trian", " Did you mean train?"),
        ("TRAIN", " Did you mean train?"),
        ("m4.quikstart", " Did you mean m4.Quickstart?"),
        ("xyzzy", ""),
        ("", ""),
    ],
)
def test_similar_words_are_suggested_in_their_own_spelling(word, suggestion):
    """Upper and lower case do not matter."""
    assert did_you_mean(word, ["train", "m4.Quickstart", "eval"]) == suggestion


def test_most_similar_words_come_first_up_to_the_limit():
    """An error stays one line."""
    assert (
        did_you_mean("layer", ["bayern", "layered", "layers", "player1"], limit=2) == " Did you mean layers, player1?"
    )


def test_user_error_is_a_value_error():
    """Code that handles invalid values need not know this class."""
    assert issubclass(UserError, ValueError)
