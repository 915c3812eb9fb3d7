"""What makes a catalog's entry a sentence pair, and why an entry is dropped."""

from __future__ import annotations

import collections
import functools
import re
import unicodedata
from collections.abc import Sequence

from lingvo_moe.data.drop import MAX_WORDS, Drop

# A language has a dominant script if at least this share of its pairs is mainly written in it.
_DOMINANCE = 2 / 3
_PAIRS_TO_JUDGE_SCRIPT = 2000

# Direction and other marks that nobody sees, and control characters. The joiners U+200C and U+200D stay: Persian and
# the scripts of India spell with them.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u202a-\u202e"
    "\u2060-\u206f\ufeff\ufff9-\ufffb]"
)
# C's %s, %-5.2f and %(name)s, strftime's %Y, Qt's and KDE's %1, LibreOffice's %PRODUCTNAME and $(ARG1), Python's
# {name}, the shell's $name and ${name}, MediaWiki's $1 and {{SITENAME}}. `%%` is a percent sign.
PLACEHOLDER = re.compile(
    r"%%|%[A-Z]{3,}|%L\d"
    r"|%(?:\(\w+\))?(?:\d+\$)?(?:[-+#0]*(?:\*|\d+))?(?:\.(?:\*|\d+))?(?:hh?|ll?|[LqjztOE])?[A-Za-z@]"
    r"|%\d{1,2}(?!\d)|\$\{[^{}]+\}|\$\(\w+\)|\$\w+|\{\{[^{}]*\}\}|\{[^{}\s]*\}"
)
_ACCELERATOR_AT_END = re.compile(r"\s*\([_&~]\w\)")
_ACCELERATOR = re.compile(r"(?<![_&~])[_&~](?=[^\W_])")
_ENTITY = re.compile(r"&#?\w+;")
_OLD_KDE_CONTEXT = re.compile(r"\A_: .*?\n", re.DOTALL)
_CONTEXT = re.compile(r"[^|\n.!?]{1,60}\|(?=\S)")
_LATIN_LETTER = re.compile("[A-Za-z]")
_ONE_SCRIPT = {"HIRAGANA": "CJK", "KATAKANA": "CJK", "HALFWIDTH": "CJK", "BOPOMOFO": "CJK", "IDEOGRAPHIC": "CJK"}


def clean(source: str, english: str) -> tuple[str, str] | Drop:
    """Returns the pair as plain one-line text, or the reason to drop it.

    Removed on both sides: context prefixes (`context|text`, KDE's `_: context`), accelerators (`_File`, `Save &As`,
    `ファイル(_F)`), invisible marks; white space becomes single spaces and the text is normalised to Unicode's NFC.
    """
    source, english = _without_context(source, english)
    source, english = _without_accelerators(tidy(source), _tidy_english(english))
    if not source or not english:
        return Drop.EMPTY
    if not _LATIN_LETTER.search(english) or not any(map(str.isalpha, source)):
        return Drop.NO_AXES
    if source.casefold() == english.casefold():
        return Drop.IDENTICAL
    if count_placeholders(source) != count_placeholders(english):
        return Drop.PLACEHOLDERS
    if max(source.count(" "), english.count(" ")) >= MAX_WORDS:
        return Drop.TOO_LONG
    return source, english


def tidy(text: str) -> str:
    """Returns the text in NFC without invisible marks, every run of white space (line ends too) one space."""
    return unicodedata.normalize("NFC", " ".join(_INVISIBLE.sub("", text).split()))


# One English text is translated into 19 languages on average.
_tidy_english = functools.lru_cache(maxsize=1 << 16)(tidy)


def count_placeholders(text: str) -> int:
    """Returns how many values the program puts into this text."""
    if "%" not in text and "$" not in text and "{" not in text:
        return 0
    return sum(match != "%%" for match in PLACEHOLDER.findall(text))


def dominant_script(sources: Sequence[str]) -> str | None:
    """Returns the script that a large majority of the texts is mainly written in, or None where there is none.

    Args:
      sources: all texts of one language, sorted, so that the even sample looked at is always the same.
    """
    sample = sources[:: max(1, len(sources) // _PAIRS_TO_JUDGE_SCRIPT)]
    votes = collections.Counter()
    for source in sample:
        scripts = collections.Counter(map(script, source))
        del scripts[""]
        if scripts:
            votes[max(scripts, key=lambda name: (scripts[name], name))] += 1
    winner = max(votes, key=lambda name: (votes[name], name), default=None)
    return winner if winner and votes[winner] >= _DOMINANCE * sum(votes.values()) else None


def is_written_in(text: str, wanted: str) -> bool:
    """Whether the text has at least one letter of the script."""
    return any(script(character) == wanted for character in text)


@functools.lru_cache(maxsize=1 << 16)
def script(character: str) -> str:
    """Returns the script of a letter, the first word of its Unicode name (`CYRILLIC`, `CJK`), or `""` if it is none.

    Japanese mixes three scripts with Chinese characters; they count as one.
    """
    if not character.isalpha():
        return ""
    name = unicodedata.name(character, "").partition(" ")[0]
    return _ONE_SCRIPT.get(name, name)


def _without_context(source: str, english: str) -> tuple[str, str]:
    if english.startswith("_: "):
        return _OLD_KDE_CONTEXT.sub("", source, count=1), _OLD_KDE_CONTEXT.sub("", english, count=1)
    if "|" not in english:
        return source, english
    context = _CONTEXT.match(english)
    if context and source.startswith(context[0]):
        return source[context.end() :], english[context.end() :]
    # A bar that the translation has too belongs to the text.
    if context and "|" not in source:
        return source, english[english.rindex("|") + 1 :]
    return source, english


def _without_accelerators(source: str, english: str) -> tuple[str, str]:
    return _without_accelerator(source, english), _without_accelerator(english, source)


def _without_accelerator(text: str, other: str) -> str:
    """Removes the mark before an accelerator's letter. A word that both sides share (`file_name`, `AT&T`) has none."""
    if "_" not in text and "&" not in text and "~" not in text:
        return text
    text = _ACCELERATOR_AT_END.sub("", text).strip()
    marks = [match.start() for match in _ACCELERATOR.finditer(text)]
    if len(marks) != 1 or _ENTITY.match(text, marks[0]):
        return text
    start = text.rfind(" ", 0, marks[0]) + 1
    word = text[start:].partition(" ")[0]
    if marks[0] > start and word in other.split(" "):
        return text
    return text[: marks[0]] + text[marks[0] + 1 :]
