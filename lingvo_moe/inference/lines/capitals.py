"""Lines in capitals: corpora of software have few, so a model reads the same line in lower case far better.

`readings` has such a line both ways, and the more confident translation is written in capitals.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

from lingvo_moe.inference.lines.kept_text import KEPT

# Up to its first letter.
_SENTENCE_START = re.compile(r"(?:\A|[.!?…][\"'»”)]*\s)[^\w]*[^\W\d_]")
# Small letters and marks that lines in capitals have, too: GROßE, 1ª, Nº.
_WITHOUT_CAPITAL = "ßªº"
# Its ordinary letters are capitals to Unicode.
_CHEROKEE = re.compile("[\u13a0-\u13fd]")
_TURKIC = ("İ", "Ğ")
_NOT_TURKISH = re.compile("(?![A-PR-VYZÇÖŞÜÂÎÛ])[^\\W\\d_]")
_TURKIC_LOWER = str.maketrans({"I": "ı", "İ": "i"})


def lower_cases(text: str) -> list[str]:
    """Returns a line in capitals in lower case, with a capital at the beginning of sentences; nothing for other lines.

    `KEPT` text stays as it is, and does not count. An `İ` or `Ğ` makes the line Turkish, which has a dotted and a
    dotless `I`. Where a line with an `I` may be Turkish, both ways to read it are returned.
    """
    letters = KEPT.sub(" ", text)
    if not _is_in_capitals(letters):
        return []
    if any(letter in text for letter in _TURKIC):
        return [_lowered(text, is_turkic=True)]
    may_be_turkic = "I" in letters and not _NOT_TURKISH.search(letters)
    return [_lowered(text, is_turkic=False), *([_lowered(text, is_turkic=True)] if may_be_turkic else [])]


def _lowered(text: str, is_turkic: bool) -> str:
    lowered = list(_outside(text, lambda part: (part.translate(_TURKIC_LOWER) if is_turkic else part).lower()))
    without_kept = KEPT.sub(lambda kept: " " * len(kept[0]), "".join(lowered))
    for start in _SENTENCE_START.finditer(without_kept):
        letter = lowered[start.end() - 1]
        lowered[start.end() - 1] = "İ" if is_turkic and letter == "i" else letter.title()
    return "".join(lowered)


def upper_case(text: str) -> str:
    """Returns a text in capitals, except for `KEPT` text."""
    return _outside(text, str.upper)


def _is_in_capitals(text: str) -> bool:
    """Returns whether there are two capitals and no other letters.

    Those without case are others: a Japanese line with a name in capitals is not in capitals. Modifier letters are
    signs of words.
    """
    letters = [
        character
        for character in text
        if unicodedata.category(character) in ("Lu", "Ll", "Lt", "Lo") and character not in _WITHOUT_CAPITAL
    ]
    capitals = [letter for letter in letters if letter.isupper() and letter.lower() != letter]
    return len(capitals) >= 2 and capitals == letters and not _CHEROKEE.search(text)


def _outside(text: str, change: Callable[[str], str]) -> str:
    """Returns the text with everything changed but `KEPT` text."""
    changed, end = [], 0
    for kept in KEPT.finditer(text):
        changed += [change(text[end : kept.start()]), kept[0]]
        end = kept.end()
    return "".join([*changed, change(text[end:])])
