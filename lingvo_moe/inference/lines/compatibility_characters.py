"""Characters that tokenizers replace by others (NFKC): `…` is read as `...`, `²` as `2`, and a model writes these.

A translation gets back those of its line: `Öffnen…` becomes `Open…`, and `5 m²` stays `5 m²`.
"""

from __future__ import annotations

import re
import unicodedata

# Ellipses, superscripts, fractions, symbols such as ™; not letters, spaces, and the wide characters of East Asia, which
# English has in another form.
_PUNCTUATION = "Po"
_CATEGORIES = (_PUNCTUATION, "No", "So", "Sm")
_DECOMPOSITIONS = ("<compat>", "<super>", "<sub>", "<fraction>", "<circle>", "<square>")


def restore(text: str, translation: str) -> str:
    """Returns a translation with the characters of the text instead of what stands for them.

    Marks of punctuation are restored by themselves, other characters in the words that have them, such as `m²`. What a
    text has in the other form, too, stays as it is.
    """
    found = [character for character in dict.fromkeys(text) if _is_replaced(character)]
    marks = [character for character in found if unicodedata.category(character) == _PUNCTUATION]
    others = "".join(character for character in found if character not in marks)
    words = re.findall(rf"\w*[{re.escape(others)}][\w{re.escape(others)}]*", text) if others else []
    for original in dict.fromkeys([*marks, *words]):
        plain = unicodedata.normalize("NFKC", original)
        if plain in text:
            continue
        if original in marks:
            translation = translation.replace(plain, original)
        else:
            translation = re.sub(rf"(?<!\w){re.escape(plain)}(?!\w)", lambda _, word=original: word, translation)
    return translation


def _is_replaced(character: str) -> bool:
    is_meant = unicodedata.category(character) in _CATEGORIES
    return is_meant and unicodedata.decomposition(character).partition(" ")[0] in _DECOMPOSITIONS
