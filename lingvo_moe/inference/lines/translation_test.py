"""The translations of a whole are as doubtful as the worst of their parts."""

from __future__ import annotations

import pytest

from lingvo_moe.inference.lines.translation import Translation, join


def test_a_part_makes_the_whole_doubtful():
    """Whichever part it is: the user is warned of what one part has lost."""
    parts = [
        Translation("green", -1.0, (((1,), (2, 3)),), confidence=0.9, truncated=True),
        Translation("red", -3.0, (((4, 5), (6,)),), confidence=0.4, is_intact=False),
        Translation("blue", -2.0, (((7,), (8,)),), confidence=0.7, is_cut=True),
    ]
    (whole,) = join([[part] for part in parts])
    pairs = (((1,), (2, 3)), ((4, 5), (6,)), ((7,), (8,)))
    assert whole == Translation("green red blue", -3.0, pairs, 0.4, truncated=True, is_intact=False, is_cut=True)
    assert whole.num_tokens == 4


def test_what_is_copied_raises_no_doubt():
    """It stands in each of the translations of the others."""
    copied, others = Translation("Open", 0.0), [Translation("green", -1.0), Translation("greet", -2.0, confidence=0.8)]
    assert join([[copied], others], "\t".join) == [
        Translation("Open\tgreen", -1.0, confidence=1.0, truncated=False, is_intact=True, is_cut=False),
        Translation("Open\tgreet", -2.0, confidence=0.8, truncated=False, is_intact=True, is_cut=False),
    ]


def test_parts_with_different_numbers_of_translations_are_an_error():
    """Some of them would be lost."""
    translation = Translation("a", -1.0)
    with pytest.raises(ValueError, match="shorter"):
        join([[translation] * 3, [translation] * 2])
