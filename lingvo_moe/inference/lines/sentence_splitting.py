"""Splits long texts, and those of many sentences, of which a model drops some, at the ends of their sentences."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lingvo_moe.data.corpora.sentence_source import SENTENCE_END, sentences

_MANY = 3  # docs/pocket_training.md has the scores of whole texts, and sentence by sentence


class Segments(NamedTuple):
    """The parts of a text.

    Attributes:
      texts: the parts in order, at least one, each short enough for the model.
      is_cut: whether a sentence was too long by itself and lost its end.
    """

    texts: list[str]
    is_cut: bool


def has_many_sentences(text: str) -> bool:
    """Returns whether a text is translated sentence by sentence even if it fits."""
    return len(sentences(text)) >= _MANY


def segment(text: str, count_tokens: Callable[[str], int], limit: int) -> Segments:
    """Returns the text itself if it fits and has one or two sentences, and otherwise its sentences.

    A part is one sentence, even where more would fit: a model that was trained on sentences drops some of many.

    Args:
      text: the text.
      count_tokens: returns the number of tokens of a text.
      limit: the largest number of tokens of a part.
    """
    if count_tokens(text) <= limit and not has_many_sentences(text):
        return Segments([text], False)
    texts, is_cut = [], False
    for sentence in filter(None, sentences(text)):
        own = Segments([sentence], False) if count_tokens(sentence) <= limit else _pieces(sentence, count_tokens, limit)
        texts += own.texts
        is_cut |= own.is_cut
    return Segments(texts or [""], is_cut)  # of a line of spaces nothing is left


def _pieces(text: str, count_tokens: Callable[[str], int], limit: int) -> Segments:
    """Splits a sentence that is too long wherever one may end; each part has as many pieces as fit."""
    ends = [match.end() for match in SENTENCE_END.finditer(text)]
    pieces = [text[begin:end] for begin, end in zip([0, *ends], [*ends, len(text)]) if text[begin:end].strip()]
    texts, is_cut, start = [], False, 0
    while start < len(pieces):
        stop = start + 1
        while stop < len(pieces) and count_tokens("".join(pieces[start : stop + 1])) <= limit:
            stop += 1
        part = "".join(pieces[start:stop])
        if count_tokens(part) > limit:
            part, is_cut = _beginning(part, count_tokens, limit), True
        texts.append(part)
        start = stop
    return Segments(texts, is_cut)


def _beginning(sentence: str, count_tokens: Callable[[str], int], limit: int) -> str:
    """Returns the longest beginning that fits, by bisection; of whole words if there are spaces."""
    fits, too_long = 0, len(sentence)  # numbers of characters
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        fits, too_long = (middle, too_long) if count_tokens(sentence[:middle]) <= limit else (fits, middle)
    words, _, _ = sentence[:fits].rpartition(" ")
    return words.rstrip() or sentence[:fits]
