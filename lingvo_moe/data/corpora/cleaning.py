"""Cleans a catalog's entry into a sentence pair, or rejects it with a reason."""

from __future__ import annotations

import collections
import functools
import re
import unicodedata
from collections.abc import Sequence

from lingvo_moe.data.corpora.rejection import MAX_WORDS, Rejection

# A script is a language's dominant one if at least this fraction of the sampled pairs is mainly written in it.
_DOMINANT_FRACTION = 2 / 3
_SCRIPT_SAMPLE = 2000  # pairs

# Invisible marks (of direction, for example), control characters, and lone surrogates, which JSON may have. The joiners
# U+200C and U+200D are kept: Persian and the scripts of India spell with them.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u202a-\u202e"
    "\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
# C's %s, %-5.2f and %(name)s, strftime's %Y, Qt's and KDE's %1, LibreOffice's %PRODUCTNAME and $(ARG1), Python's
# {name}, the shell's $name and ${name}, MediaWiki's $1 and {{SITENAME}}. `%%` is a percent sign. Zeros are flags only
# before another flag or `*`, so there is one way to read them: with two, a line of zeros takes time with their square.
PLACEHOLDER = re.compile(
    r"%%|%[A-Z]{3,}|%L\d"
    r"|%(?:\(\w+\))?(?:\d+\$)?(?:(?:0*[-+#])*+(?:0*\*|\d++))?(?:\.(?:\*|\d++))?(?:hh?|ll?|[LqjztOE])?[A-Za-z@]"
    r"|%\d{1,2}(?!\d)|\$\{[^{}]+\}|\$\(\w+\)|\$\w+|\{\{[^{}]*\}\}|\{[^{}\s]*\}"
)
_ACCELERATOR_IN_PARENTHESES = re.compile(r"\s*\([_&~]\w\)")
# Before a number, `~` means about: ~10 MB.
_ACCELERATOR = re.compile(r"(?<![_&~])(?:[_&](?=[^\W_])|~(?=[^\W\d_]))")
_BEFORE_DIGIT = re.compile(r"(?<=[^\W_])[_&]\d")  # inside of a name: Report_2023
# What may be an identifier or a name, in a word such as `(file_name)`, `$_GET,` or `R&D-Abteilung`. Letters of scripts
# that have no spaces are beside it, not in it.
_IDENTIFIER = re.compile(r"[$@]?[0-9A-Za-zÀ-ɏ_&~]+")
_INITIALS = re.compile(r"(?!O&K)[A-Z]&[A-Z]")  # R&D, F&E; `O&K` is an OK with an accelerator
# `H_TTPS`, `Positio_n`, `S&VG`: in a label these have an accelerator, even if the translation has them too.
_ACCELERATED = re.compile(r"[A-Z](?:[a-z]*[_&~][a-z]+|_[A-Z]{1,4}|[&~][A-Z]{2,4})")
_LABEL_WORDS = 4
ENTITY = re.compile(r"&#?\w+;")  # &nbsp;, &#8230;
_OLD_KDE_CONTEXT = re.compile(r"\A_: .*?\n", re.DOTALL)
_QUALIFIER = re.compile(r"\A\?[^:\n]{1,60}:")
_CONTEXT = re.compile(r"[^|\n.!?]{1,60}\|(?=\S)")
_LATIN_LETTER = re.compile("[A-Za-z]")
_ONE_SCRIPT = {"HIRAGANA": "CJK", "KATAKANA": "CJK", "HALFWIDTH": "CJK", "BOPOMOFO": "CJK", "IDEOGRAPHIC": "CJK"}


def clean(source: str, english: str) -> tuple[str, str] | Rejection:
    """Returns the pair (source, english) as plain one-line text, or the reason to reject it.

    Removed from both sides: context prefixes (`context|text`, `?context:text`, KDE's `_: context`), accelerators
    (`_File`, `Save &As`, `ファイル(_F)`) and invisible marks. White space becomes single spaces, and the text is
    normalised to Unicode's NFC.
    """
    source, english = _without_context(source, english)
    source, english = _without_accelerators(tidy(source), _tidy_english(english))
    if not source or not english:
        return Rejection.EMPTY
    if not _LATIN_LETTER.search(english) or not any(map(str.isalpha, source)):
        return Rejection.NO_LETTERS
    if source.casefold() == english.casefold():
        return Rejection.IDENTICAL
    if count_placeholders(source) != count_placeholders(english):
        return Rejection.PLACEHOLDERS
    if max(source.count(" "), english.count(" ")) >= MAX_WORDS:
        return Rejection.TOO_MANY_WORDS
    return source, english


def tidy(text: str) -> str:
    """Returns the text in NFC, without invisible marks, with every run of white space (line ends too) as one space."""
    return unicodedata.normalize("NFC", " ".join(_INVISIBLE.sub("", text).split()))


# One English text is translated into 19 languages on average.
_tidy_english = functools.lru_cache(maxsize=1 << 16)(tidy)


def accelerator_mark(text: str) -> int | None:
    """Returns the position of an accelerator's mark; None if there is none, or more than one mark."""
    marks = [match.start() for match in _ACCELERATOR.finditer(text)]
    if len(marks) != 1 or ENTITY.match(text, marks[0]) or _BEFORE_DIGIT.match(text, marks[0]):
        return None
    return marks[0]


def count_placeholders(text: str) -> int:
    """Returns the number of placeholders, the values that a program inserts into this text."""
    if "%" not in text and "$" not in text and "{" not in text:
        return 0
    return sum(match != "%%" for match in PLACEHOLDER.findall(text))


def dominant_script(sources: Sequence[str]) -> str | None:
    """Returns the script that a large majority of the texts is mainly written in, or None if there is none.

    Args:
      sources: all texts of one language, sorted, so that the evenly spaced sample is always the same.
    """
    sample = sources[:: max(1, len(sources) // _SCRIPT_SAMPLE)]
    votes = collections.Counter()
    for source in sample:
        scripts = collections.Counter(map(script, source))
        del scripts[""]
        if scripts:
            votes[max(scripts, key=lambda name: (scripts[name], name))] += 1
    winner = max(votes, key=lambda name: (votes[name], name), default=None)
    return winner if winner and votes[winner] >= _DOMINANT_FRACTION * sum(votes.values()) else None


def is_written_in(text: str, wanted: str) -> bool:
    """Returns whether the text has at least one letter of the script."""
    return any(script(character) == wanted for character in text)


@functools.lru_cache(maxsize=1 << 16)
def script(character: str) -> str:
    """Returns a letter's script, the first word of its Unicode name (`CYRILLIC`, `CJK`), or `""`.

    Japanese mixes three scripts with Chinese characters; all of them count as `CJK`.
    """
    if not character.isalpha():
        return ""
    name = unicodedata.name(character, "").partition(" ")[0]
    return _ONE_SCRIPT.get(name, name)


def _without_context(source: str, english: str) -> tuple[str, str]:
    if english.startswith("_: "):
        return _OLD_KDE_CONTEXT.sub("", source, count=1), _OLD_KDE_CONTEXT.sub("", english, count=1)
    if english.startswith("?"):
        return _QUALIFIER.sub("", source), _QUALIFIER.sub("", english)
    if "|" not in english:
        return source, english
    context = _CONTEXT.match(english)
    if context and source.startswith(context[0]):
        return source[context.end() :], english[context.end() :]
    # A vertical bar that the translation has too belongs to the text.
    if context and "|" not in source:
        return source, english[english.rindex("|") + 1 :]
    return source, english


def _without_accelerators(source: str, english: str) -> tuple[str, str]:
    return _without_accelerator(source, english), _without_accelerator(english, source)


def _without_accelerator(text: str, other: str) -> str:
    """Removes the mark before an accelerator's letter, except in a name that both sides share (`file_name`, `AT&T`)."""
    if "_" not in text and "&" not in text and "~" not in text:
        return text
    text = _ACCELERATOR_IN_PARENTHESES.sub("", text).strip()
    mark = accelerator_mark(text)
    if mark is None or _is_in_name(text, mark, other):
        return text
    return text[:mark] + text[mark + 1 :]


def _is_in_name(text: str, mark: int, other: str) -> bool:
    """Returns whether the mark is in initials, or inside of an identifier or address that the other side has too."""
    start = text.rfind(" ", 0, mark) + 1
    word = text[start:].partition(" ")[0]
    name = next(found for found in _IDENTIFIER.finditer(word) if found.end() > mark - start)
    if _INITIALS.fullmatch(name[0]):
        return True
    is_label = max(text.count(" "), other.count(" ")) < _LABEL_WORDS
    if mark == start or (is_label and _ACCELERATED.fullmatch(name[0])):
        return False
    # Without the punctuation beside the name, in which the sides may differ; but `_` at its beginning needs the same.
    is_inside = mark > start + name.start()
    return word in other.split(" ") or (is_inside and name[0] in _IDENTIFIER.findall(other))
