"""Splits lines that are longer than a model's limit at the ends of their sentences."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lingvo_moe.data.sentence_source import SENTENCE_END


class Segments(NamedTuple):
    """The parts of a line.

    Attributes:
      texts: the parts in order, at least one, each short enough for the model.
      truncated: whether a sentence was too long by itself and lost its end.
    """

    texts: list[str]
    truncated: bool


def segment(line: str, count_tokens: Callable[[str], int], limit: int) -> Segments:
    """Returns a line's parts, each of as many whole sentences as fit.

    Args:
      line: the text.
      count_tokens: returns the number of tokens of a text.
      limit: the largest number of tokens of a part.
    """
    if count_tokens(line) <= limit:
        return Segments([line], False)
    ends = [match.end() for match in SENTENCE_END.finditer(line)]
    texts, truncated, start = [], False, 0
    sentences = [line[begin:end] for begin, end in zip([0, *ends], [*ends, len(line)]) if line[begin:end].strip()]
    while start < len(sentences):
        stop = start + 1
        while stop < len(sentences) and count_tokens("".join(sentences[start : stop + 1])) <= limit:
            stop += 1
        text = "".join(sentences[start:stop])
        if count_tokens(text) > limit:
            text, truncated = _beginning(text, count_tokens, limit), True
        texts.append(text)
        start = stop
    return Segments(texts or [""], truncated)  # of a line of spaces nothing is left


def _beginning(sentence: str, count_tokens: Callable[[str], int], limit: int) -> str:
    """Returns the longest beginning that fits, by bisection; of whole words if there are spaces."""
    fits, too_long = 0, len(sentence)  # numbers of characters
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        fits, too_long = (middle, too_long) if count_tokens(sentence[:middle]) <= limit else (fits, middle)
    words, _, _ = sentence[:fits].rpartition(" ")
    return words.rstrip() or sentence[:fits]
