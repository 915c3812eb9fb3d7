"""Which texts are English."""

from __future__ import annotations

import numpy as np
import pytest

from lingvo_moe.data.tokenizer import Tokenizer
from lingvo_moe.inference.lines.english import is_english

_WORDS = "cancel the file was not found open folder map save changes name of user".split()


class _English(Tokenizer):
    """A piece for each of some words, and for each letter of others."""

    def encode(self, texts):
        return [np.zeros(1 if text in _WORDS else len(text), np.int32) for text in texts]

    def has_pieces_for(self, text):
        return text.isascii()


@pytest.mark.parametrize(
    "text, expected",
    [
        ("Cancel", True),
        ("The file was not found.", True),
        ("THE FILE WAS NOT FOUND.", True),
        ("This city cannot be conquered without an army", True),
        ("Open the {map_der_gebruikers} folder", True),
        ("Datei nicht gefunden", False),
        ("Fichier introuvable", False),
        ("Map openen", False),
        ("Öffne open folder", False),
        ("Open the folder ☃", False),
        ("Kartta {file_name_of_the_user}", False),
        ("<file> `open the folder`", False),
        ("12 % s", False),
        ("", False),
    ],
)
def test_english(text, expected):
    """Placeholders, tags and code are in English in every language, and do not count."""
    assert is_english(text, _English(b"")) is expected


@pytest.mark.parametrize(
    "text, english, pidgin, expected",
    [
        ("open folder", -1.9, -9.0, True),
        ("open folder", -2.1, -9.0, False),
        ("open qqq", 0.6, -9.0, True),
        ("open qqq", 0.4, -9.0, False),
        ("qqq", -9.0, 3.0, True),
        ("qqq", -9.0, 2.9, False),
    ],
)
def test_the_margin_and_the_share_of_whole_words_are_added(monkeypatch, text, english, pidgin, expected):
    """The margin is over the most probable other language, and Pidgin is no other language."""
    scores = [("en", english), ("pcm", pidgin), ("de", 0.0), ("fr", -5.0)]
    monkeypatch.setattr("py3langid.rank", lambda text: scores)
    assert is_english(text, _English(b"")) is expected


def test_a_word_that_the_tokenizer_knows_is_more_probably_english():
    """The identifier alone takes short words for any language."""
    assert is_english("Cancel", _English(b"")) and not is_english("Kancel", _English(b""))
