"""Finds English texts, to be copied: a model that is not trained on English sources changes them."""

from __future__ import annotations

import re

import py3langid

from lingvo_moe.data.tokenizer import Tokenizer
from lingvo_moe.inference.lines.capitals import lower_cases
from lingvo_moe.inference.lines.kept_text import KEPT

_WORD = re.compile(r"[^\W\d_]{2,}")
_ENGLISH = ("en", "pcm")  # Nigerian Pidgin has English words
# Nats; docs/pocket.md has how many lines of each kind are taken for English.
_WEIGHT_OF_WHOLE_WORDS, _THRESHOLD = 5.0, 3.0


def is_english(text: str, english: Tokenizer) -> bool:
    """Returns whether a text is most probably English.

    Two things count: how much more probable English is than any other language, by the character n-grams of py3langid
    (Lui and Baldwin 2012), and the share of words that are single pieces of an English tokenizer. `KEPT` text does not
    count. A text with a character that the tokenizer has no piece for is not English.

    Args:
      text: without marks of accelerators.
      english: the tokenizer of the target.
    """
    without_kept = " ".join(KEPT.sub(" ", (lower_cases(text) or [text])[0]).split())
    words = _WORD.findall(without_kept)
    if not words or not english.has_pieces_for(without_kept):
        return False
    forms = english.encode([*words, *map(str.lower, words)])
    whole = [min(map(len, pair)) == 1 for pair in zip(forms[: len(words)], forms[len(words) :], strict=True)]
    return _margin(without_kept) + _WEIGHT_OF_WHOLE_WORDS * sum(whole) / len(whole) >= _THRESHOLD


def _margin(text: str) -> float:
    """Returns the log-odds of English against the most probable other language."""
    scores = {str(language): float(score) for language, score in py3langid.rank(text)}
    return max(scores.pop(language) for language in _ENGLISH) - max(scores.values())
