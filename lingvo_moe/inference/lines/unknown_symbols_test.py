"""Emoji and other symbols that a tokenizer does not know do not reach the model, and those at the ends are kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lingvo_moe.data.tokenizer import Tokenizer
from lingvo_moe.inference.lines.unknown_symbols import Framed, take_out


class _Tokenizer(Tokenizer):
    """Knows everything but these."""

    def has_pieces_for(self, text: str) -> bool:
        return text not in "😀🎉❤👍🏽🇩🇪日\u20e3"


_TOKENIZER = _Tokenizer(b"")


@pytest.mark.parametrize(
    "line, expected",
    [
        ("Datei speichern", Framed("", "Datei speichern", "")),
        ("  two  spaces ", Framed("", "  two  spaces ", "")),
        ("😀 Datei", Framed("😀 ", "Datei", "")),
        ("Datei🎉", Framed("", "Datei", "🎉")),
        ("🎉 😀Datei 👍🏽 ", Framed("🎉 😀", "Datei", " 👍🏽 ")),
        ("Guten Morgen 😀, wie geht es?", Framed("", "Guten Morgen, wie geht es?", "")),
        ("😀 ein 🎉 Fest ❤\ufe0f", Framed("😀 ", "ein Fest", " ❤\ufe0f")),
        ("ja😀nein 🎉(doch)", Framed("", "ja nein (doch)", "")),
        ("🎉\U000e0067\U000e007f Fest", Framed("🎉\U000e0067\U000e007f ", "Fest", "")),
        ("1\ufe0f\u20e3 Datei 2", Framed("1\ufe0f\u20e3 ", "Datei 2", "")),
        ("🇩🇪 Deutsch", Framed("🇩🇪 ", "Deutsch", "")),
        ("🎉", Framed("🎉", "", "")),
        ("😀 🎉 ", Framed("😀 🎉 ", "", "")),
        ("日 ★", Framed("", "日 ★", "")),  # a letter that is unknown, a symbol that is known
        ("", Framed("", "", "")),
    ],
)
def test_symbols_at_the_ends_are_kept_and_those_inside_are_left_out(line, expected):
    """The lines are taken out together with one that has all symbols, which must not matter."""
    assert take_out([line, "😀🎉❤👍🏽🇩🇪 x"], _TOKENIZER)[0] == expected


def test_a_keycap_that_the_tokenizer_knows_stays():
    class KnowsAll(Tokenizer):
        def has_pieces_for(self, text: str) -> bool:
            return True

    assert take_out(["1\ufe0f\u20e3 Datei"], KnowsAll(b"")) == [Framed("", "1\ufe0f\u20e3 Datei", "")]


@given(st.lists(st.text("ab 😀🎉❤\ufe0f🏽.\t", max_size=12), max_size=4))
def test_what_is_left_has_no_unknown_symbol(lines):
    """Whatever their order; no other character is lost but spaces and joiners, and a second time nothing changes."""
    framed = take_out(lines, _TOKENIZER)
    for line, (before, text, after) in zip(lines, framed, strict=True):
        assert not set(text) & set("😀🎉❤🏽") and line.startswith(before) and line.endswith(after)
        kept = [character for character in line if character in "ab."]
        assert [character for character in text if character in "ab."] == kept and not set(before + after) & set("ab.")
    assert take_out([frame.text for frame in framed], _TOKENIZER) == [Framed("", frame.text, "") for frame in framed]


def test_many_symbols_take_no_longer_than_many_letters():
    """A regular expression with nested repetitions would take years here."""
    line = ("😀 " * 200 + "a") * 20 + "🎉" * 2000
    assert take_out([line], _TOKENIZER) == [Framed("😀 " * 200, " ".join("a" * 20), "🎉" * 2000)]
    for many in ("😀" * 100_000, "😀" + " " * 100_000):
        assert take_out([f"a{many}b"], _TOKENIZER)[0].text.split() == ["a", "b"]
