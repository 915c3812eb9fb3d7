"""Accelerator marks: `_Datei`, `Enre&gistrer`, `파일(_F)`. Programs' messages have them, the text of corpora does not.

`data.cleaning` removes them from training pairs, with both sides in view. Here there is only the source, so a mark
stays in what looks like an identifier or a name: `entity_id`, `AT&T`.
"""

from __future__ import annotations

import re
import unicodedata

from lingvo_moe.data.corpora.cleaning import accelerator_mark
from lingvo_moe.data.tokenizer import Tokenizer
from lingvo_moe.inference.lines.kept_text import KEPT

# Not after a name, which makes it a call of a function: `malloc(&p)`.
_IN_PARENTHESES = re.compile(r"(?<![a-z0-9_])(?<![a-z0-9_]\s)\s*\([_&~]\w\)|\s*\([_&~][A-Z0-9]\)")
_OPENING = "\"'«»“„‘‚([¿¡"
_CLOSING = "\"'«»“”’)].,:;!?…"
_INSIDE = "'’-"  # of words: l'azione, E-Mail
_MOST_OF_A_NAME = 2  # letters beside an ampersand: AT&T, R&D
_MOST_OF_A_LABEL = 3  # words; longer texts have identifiers rather than accelerators inside of words


def without_accelerator(text: str, tokenizer: Tokenizer) -> str:
    """Returns the text without the mark of its accelerator; a text with several marks is returned as it is.

    A mark inside of a word is removed if the word has fewer pieces than its two halves: `Abbrechen` is a word, and
    `entityid` is not. Between quotes and in texts that are no labels, `user_name` keeps it as well, whose halves are
    words of one piece.

    Args:
      text: a line.
      tokenizer: of the source.
    """
    text = _IN_PARENTHESES.sub("", text).strip() or text
    mark = accelerator_mark(text)
    if mark is None or any(kept.start() <= mark < kept.end() for kept in KEPT.finditer(text)):
        return text
    return text[:mark] + text[mark + 1 :] if _is_accelerator(text, mark, tokenizer) else text


def _is_accelerator(text: str, mark: int, tokenizer: Tokenizer) -> bool:
    """Returns whether the mark is before a letter of a word, and not in an identifier, a name or a path."""
    start = text.rfind(" ", 0, mark) + 1
    before = text[start:mark].lstrip(_OPENING)
    # Of `_Ein/Aus`, the word with the mark.
    after = text[mark + 1 :].partition(" ")[0].partition("/")[0].rstrip(_CLOSING)
    if not _is_word(after) or (before and not _is_word(before)):
        return False
    half = re.split(f"[{_INSIDE}]", before)[-1]
    if not half:  # at the beginning of a word: `_Datei`, `l'_azione`
        return True
    if (half + after).isupper() and (text[mark] == "_" or min(len(half), len(after)) <= _MOST_OF_A_NAME):
        return False
    whole, *halves = map(len, tokenizer.encode([half + after, half, after]))
    is_label = text[start] not in _OPENING and len(text.split()) <= _MOST_OF_A_LABEL
    if text[mark] == "_" and halves == [1, 1] and not is_label:
        return False
    return whole < sum(halves)


def _is_word(text: str) -> bool:
    """Returns whether this is letters, with their combining marks, and what joins them."""
    kinds = [unicodedata.category(character)[0] for character in text]
    joined = all(kind in "LM" or character in _INSIDE for kind, character in zip(kinds, text))
    return joined and kinds[:1] == ["L"]
