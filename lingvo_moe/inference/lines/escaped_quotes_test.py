"""Quotes lose their backslashes before the translation, and get them back."""

from __future__ import annotations

import pytest

from lingvo_moe.inference.lines.escaped_quotes import Unescaped, unescape


@pytest.mark.parametrize(
    "text, unescaped",
    [
        (r"\"Datei\" fehlt", Unescaped('"Datei" fehlt', '"')),
        (r"l\'azione \"%s\"", Unescaped('l\'azione "%s"', "\"'")),
        (r'"Datei" und \"Ordner\"', Unescaped(r'"Datei" und \"Ordner\"', "")),
        (r"\\" + '"Datei"', Unescaped(r"\\" + '"Datei"', "")),
        ("'Datei'", Unescaped("'Datei'", "")),
        ("", Unescaped("", "")),
    ],
)
def test_backslashes_are_removed_and_added(text, unescaped):
    """A text that has quotes with and without them is left as it is."""
    assert unescape(text) == unescaped
    assert unescaped.escape(unescaped.text) == text


@pytest.mark.parametrize(
    "translation, escaped",
    [(r'File \"a\", "b"', r"File \"a\", \"b\""), (r'"C:\\"', r"\"C:\\\""), (r"\n", r"\n")],
)
def test_backslashes_of_the_translation_are_kept(translation, escaped):
    """A model may write them by itself; a second one would end the string in the program."""
    assert unescape(r"\"Datei\"").escape(translation) == escaped


def test_a_translation_may_have_other_quotes():
    assert unescape(r"l\'azione").escape('the user\'s action, "x"') == r"the user\'s action, " + '"x"'
