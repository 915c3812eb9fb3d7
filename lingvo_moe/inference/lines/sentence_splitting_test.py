"""Protects the splitting of long lines: nothing is lost but the end of a sentence that is too long by itself."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies

from lingvo_moe.inference.lines.sentence_splitting import segment


def _words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize(
    "line, limit, expected",
    [
        ("One two. Three.", 3, ["One two. Three."]),
        ("One two. Three four.", 3, ["One two.", "Three four."]),
        ("One. Two. Three four. Five.", 3, ["One.", "Two.", "Three four.", "Five."]),
        ('He said: "Stop!" She went on.', 3, ['He said: "Stop!"', "She went on."]),
        ("Version 3.5 is out. It works.", 4, ["Version 3.5 is out.", "It works."]),
        ("See No. 5 of them. It works.", 5, ["See No. 5 of them.", "It works."]),
        ("Print (it. Then. Stop it.", 3, ["Print (it. Then. ", "Stop it."]),
    ],
)
def test_lines_are_cut_at_sentence_ends(line, limit, expected):
    """Each sentence is a part; one that is too long is also split inside of parentheses."""
    assert segment(line, _words, limit) == (expected, False)


def test_chinese_sentences_need_no_spaces():
    """Their full stop is enough."""
    assert segment("你好。我们走吧！好", len, 5) == (["你好。", "我们走吧！", "好"], False)


@pytest.mark.parametrize(
    "line, count, expected",
    [("one two three four five", _words, ["one two three"]), ("一二三四五六", len, ["一二三"])],
)
def test_a_sentence_that_is_too_long_loses_its_end(line, count, expected):
    """It is cut between words, or between characters where there are no spaces, and the caller can warn."""
    assert segment(line, count, 3) == (expected, True)


def test_a_long_line_without_a_sentence():
    """Of spaces nothing is left to translate; a run of points ends no sentence, and is not tried point by point."""
    assert segment("\x85" * 40, len, 12) == ([""], False)
    assert segment("." * 1_000_000, len, 12) == (["." * 12], True)


@hypothesis.given(strategies.lists(strategies.sampled_from(["ab", "c.", "d!", "e?)", "。", "f", "..."]), max_size=40))
def test_parts_fit_and_nothing_else_is_lost(words):
    """With every sentence short enough, the parts are the line; otherwise each part fits all the same."""
    line = " ".join(words)
    texts, is_cut = segment(line, len, 12)
    assert all(len(text) <= 12 for text in texts)
    assert is_cut or "".join("".join(texts).split()) == "".join(line.split())
