"""Characters that tokenizers replace by others (NFKC): `…` is read as `...`, `²` as `2`, and a model writes these.

A translation gets back those of its line: `Öffnen…` becomes `Open…`, and `5 m²` stays `5 m²`.
"""

from __future__ import annotations

import re
import unicodedata

from lingvo_moe.inference.lines.kept_text import LETTER

# Ellipses, superscripts, fractions, symbols such as ™. Not letters, spaces and the wide characters of East Asia (㎏),
# nor `№`, `℃`, `℉` and the full stop of Armenian texts (U+2024): English has these in another form.
_PUNCTUATION = "Po"
_CATEGORIES = (_PUNCTUATION, "No", "So", "Sm")
_DECOMPOSITIONS = ("<compat>", "<super>", "<sub>", "<fraction>", "<circle>")
_WIDE = "W"
_OTHERS_IN_ENGLISH = "№℃℉\u2024"
# What a model writes for a character, and one that it writes for another.
_COPYRIGHT, _WRITTEN_COPYRIGHT = "©", "(c)"
_RATIO, _COLON = "\u2236", ":"
_MOST_WORDS = 100  # for each of them the translation is searched


def restore(text: str, translation: str) -> str:
    """Returns a translation with the characters of the text instead of what stands for them.

    Marks of punctuation are restored by themselves, other characters in the words that have them, such as `m²`. What a
    text has in the other form, too, stays as it is, and so do words after the first hundred.
    """
    found = [character for character in dict.fromkeys(text) if _is_replaced(character)]
    marks = [character for character in found if unicodedata.category(character) == _PUNCTUATION]
    others = "".join(character for character in found if character not in marks)
    words = [word for word in re.findall(f"[{LETTER}{re.escape(others)}]+", text) if not set(others).isdisjoint(word)]
    for original in [*marks, *list(dict.fromkeys(words))[:_MOST_WORDS]]:
        plain = unicodedata.normalize("NFKC", original)
        if plain in text:
            continue
        if original in marks:
            translation = translation.replace(plain, original)
        else:
            translation = re.sub(rf"(?<!\w){re.escape(plain)}(?!\w)", lambda _, word=original: word, translation)
    if _COPYRIGHT in text and _WRITTEN_COPYRIGHT not in text.lower():
        translation = translation.replace(_WRITTEN_COPYRIGHT, _COPYRIGHT)
    return translation if _RATIO in text else translation.replace(_RATIO, _COLON)


def _is_replaced(character: str) -> bool:
    if unicodedata.category(character) not in _CATEGORIES or unicodedata.east_asian_width(character) == _WIDE:
        return False
    decomposition = unicodedata.decomposition(character).partition(" ")[0]
    return decomposition in _DECOMPOSITIONS and character not in _OTHERS_IN_ENGLISH
