"""Accelerator marks: `_Datei`, `Enre&gistrer`, `파일(_F)`. Messages of programs have them, the text of corpora has not.

`data.cleaning` removes them from training pairs, with both sides in view. Here there is only the source, so what looks
like an identifier or a name keeps its mark: `entity_id`, `AT&T`.
"""

from __future__ import annotations

import re

from lingvo_moe.data import cleaning
from lingvo_moe.data.tokenizer import Tokenizer

_WORD = re.compile(r"\W*(?P<before>[^\W\d_]*)[_&~](?P<after>[^\W\d_]+)\W*")


def without_accelerator(text: str, tokenizer: Tokenizer) -> str:
    """Returns the text without the mark of its accelerator; a text with several marks is returned as it is.

    A mark inside of a word is removed if the word has fewer pieces than its two halves: `Abbrechen` is a word, and
    `entityid` is not.

    Args:
      text: a line.
      tokenizer: of the source.
    """
    text = cleaning.without_accelerator_at_end(text)
    mark = cleaning.accelerator_mark(text)
    if mark is None or not _is_in_word(text, mark, tokenizer):
        return text
    return text[:mark] + text[mark + 1 :]


def _is_in_word(text: str, mark: int, tokenizer: Tokenizer) -> bool:
    """Returns whether what is between spaces is a word with a mark, and not an identifier, a name or an address."""
    start = text.rfind(" ", 0, mark) + 1
    word = _WORD.fullmatch(text[start:].partition(" ")[0])
    if word is None:
        return False
    before, after = word["before"], word["after"]
    if not before:
        return True
    if (before + after).isupper() and not text.isupper():
        return False
    whole, *halves = map(len, tokenizer.encode([before + after, before, after]))
    return whole < sum(halves)
