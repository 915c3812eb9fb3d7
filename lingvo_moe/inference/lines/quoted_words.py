"""A word in quotes: a model drops the quotes of a single word, and keeps those of a sentence."""

from __future__ import annotations

import re

from lingvo_moe.inference.lines.unknown_symbols import Framed

# By their opening quote. Those that English does not have become `"` and `'`.
_PAIRS = {'"': '"', "'": "'", "«": "»", "»": "«", "„": "“”", "“": "”“", "‘": "’", "‚": "‘’", "‹": "›", "「": "」"}
_SINGLE = "'‘‚‹"
_WORD = re.compile(r"[^\W\d_]+(?:-[^\W\d_]+)*")


def take_off(frame: Framed) -> Framed:
    """Returns a frame with the quotes of its text in it, if that is one word."""
    opening, word, closing = frame.text[:1], frame.text[1:-1].strip(), frame.text[1:][-1:]
    if not closing or closing not in _PAIRS.get(opening, "") or not _WORD.fullmatch(word):
        return frame
    quote = "'" if opening in _SINGLE else '"'
    return Framed(f"{frame.before}{quote}", word, f"{quote}{frame.after}")
