"""What a program reads in a line, and a translation must keep as it is: placeholders, tags, addresses, codes, numbers.

Codes are names of files and identifiers, paths, hexadecimal numbers, and what is between backticks.
"""

from __future__ import annotations

import collections
import re
import string
import unicodedata

from lingvo_moe.data.cleaning import ENTITY, PLACEHOLDER

# The letters of scripts that have spaces between words: in `https://a.de/를` the address ends before the Korean letter.
_LETTER = "A-Za-z0-9À-ɏͰ-ϿЀ-ԯ"
_IN_ADDRESS = rf"[{_LETTER}%&#@~$+=/_:?!.,;*'-]"
_AT_ITS_END = rf"[{_LETTER}%&#@~$+=/-]"
_BEFORE = r"(?<![A-Za-z0-9.+%_-])"
ADDRESS = re.compile(
    rf"{_BEFORE}(?i:https?://|ftp://|www\.){_IN_ADDRESS}*{_AT_ITS_END}"
    rf"|{_BEFORE}[A-Za-z0-9_+-][A-Za-z0-9._+-]*@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+"
)
_TAG = r"</?[A-Za-z][^<>]*>"
_ESCAPE = r"\\[abfnrtv\"'\\]"
_VARIABLE = r"@\w+@"
# Before those of corpora, where `$1` ends at the next space: in `$1に移動` the letters are no part of it.
_VALUE = rf"\$\d+|\$[A-Za-z_][A-Za-z0-9_]*|{PLACEHOLDER.pattern}"

_IN_NAME = rf"[{_LETTER}_.+~-]"
# Of Windows, with a drive, and of Unix, with two slashes or one after `~` or points; `km/h` and `/Nein` are none.
_PATH = (
    rf"(?<![{_LETTER}])[A-Za-z]:\\(?:{_IN_NAME}+(?: {_IN_NAME}+)*\\)*+{_IN_NAME}*[{_LETTER}_]"
    rf"|(?<![{_LETTER}_.:~/<-])(?:~|\.\.?|/{_IN_NAME}*[{_LETTER}_])(?:/{_IN_NAME}*[{_LETTER}_])+/?"
)
_BACKTICKS = r"`[^`'\s][^`']*`"
# Hexadecimal numbers, UUIDs, MAC addresses and hashes.
_HEXADECIMAL = (
    r"\b0[xX][0-9A-Fa-f]+\b"
    r"|\b[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}\b"
    r"|\b[0-9A-Fa-f]{2}(?:[:-][0-9A-Fa-f]{2}){5}\b"
    r"|\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{8,}\b|\b(?=[A-F]*\d)(?=\d*[A-F])[0-9A-F]{8,}\b"
)
# `report.pdf`, `db.example.com:80`; not `z.B.`, `t.ex.`, nor the end of a sentence, after which there is a capital.
_FILE = (
    rf"(?<![{_LETTER}_.@+-])[{_LETTER}_]{{2}}[{_LETTER}_+-]*(?:\.[{_LETTER}_+-]+)*\.[a-z][a-z0-9]{{1,4}}"
    rf"(?::\d+)?(?![{_LETTER}_]|\.[{_LETTER}])"
)
_IDENTIFIER = rf"(?<![{_LETTER}_])[A-Za-z][A-Za-z0-9]*(?:_[A-Za-z0-9]+)+(?![{_LETTER}_])"
# Without identifiers, whose `_` may be an accelerator's mark.
KEPT = re.compile(
    "|".join(
        [_TAG, ENTITY.pattern, ADDRESS.pattern, _PATH, _ESCAPE, _VARIABLE, _VALUE, _BACKTICKS, _HEXADECIMAL, _FILE]
    )
)

# With separators inside, and with the letters beside it: `1.234,5`, `10:30`, `2024-12-31`, `H264`, `10MB`. That of a
# month may become its name: `12月`, `tháng 12`.
_DATE = r"\d{4}-\d{2}-\d{2}"
_GROUPED = r"\d{1,3}(?:[ \u00a0\u202f]\d{3})+(?!\d)(?:[.,٫]\d+)?"
_SEPARATED = r"\d+(?:[.,:/'’٫٬]\d+)*+"
_NUMBER = rf"(?<!tháng )(?:(?<![A-Za-z])[A-Za-z]++)?(?:{_DATE}|{_GROUPED}|{_SEPARATED})(?!\d)[A-Za-z]*+(?!\s?[月월])"
# `1.234,5` and `1,234.5` are the same number, `1.2.3` and `12.3` are not.
_DECIMAL = re.compile(r"\d{1,3}(?:[ .,'’٬\u00a0\u202f]\d{3})*(?:[.,٫]\d+)?|\d+(?:[.,٫]\d+)?")
_FEWEST_DIGITS = 2  # one digit may become a word

_REQUIRED = re.compile(
    rf"(?P<tag>{_TAG})|{ENTITY.pattern}|(?P<address>{ADDRESS.pattern})|(?P<path>{_PATH})|{_ESCAPE}|%%"
    rf"|(?P<placeholder>{_VARIABLE}|{_VALUE})|(?P<code>{_BACKTICKS}|{_HEXADECIMAL}|{_FILE}|{_IDENTIFIER})"
    rf"|(?P<number>{_NUMBER})"
)
_WITHOUT_WORDS = re.compile(f"{ENTITY.pattern}|{_ESCAPE}")
_NUMBERED = re.compile(r"%(\d{1,2})")
_NAME = re.compile(r"</?\s*([A-Za-z][\w:.-]*)")
_WITHOUT_END = ("br", "hr", "img", "li", "p")


def required(text: str) -> list[re.Match]:
    """Finds what a translation has to have exactly as often: placeholders, addresses, tags of markup, codes, numbers.

    Entities are not among them, which stand for characters of a language (`&nbsp;:`); neither are names between angle
    brackets that are translated (`<Datei>`), and numbers of one digit. Of percentages (`%50`, `100%ig`) the number is.

    Returns:
      The matches, whose `lastgroup` is `tag`, `address`, `path`, `placeholder`, `code` or `number`.
    """
    found = [each for each in _REQUIRED.finditer(text) if each.lastgroup]
    ended = {name[1].lower() for each in found if each[0].startswith("</") and (name := _NAME.match(each[0]))}
    numbers = {int(number[1]) for each in found if (number := _NUMBERED.fullmatch(each[0]))}
    is_numbered = numbers == set(range(1, len(numbers) + 1))
    kept, end = [], 0
    for each in found:
        if _is_percentage(text, each, end, is_numbered):
            kept.append(_REQUIRED.match(text, each.start() + 1))  # of `%50`, the number
            continue
        kept.append(each)
        if each.lastgroup != "number":
            end = each.end()
    return [each for each in kept if each and _is_required(each, ended)]


def has_words(text: str) -> bool:
    """Returns whether a text has letters outside of entities, escapes and what is `required`, except for codes."""
    parts, end = [], 0
    for each in required(text):
        if each.lastgroup != "code":  # which may be a word with an accelerator's mark
            parts.append(text[end : each.start()])
            end = each.end()
    return any(map(str.isalpha, _WITHOUT_WORDS.sub(" ", " ".join([*parts, text[end:]]))))


def count_required(text: str) -> collections.Counter[str]:
    """Returns how often a translation has to have each text that is `required`; equal numbers are written alike."""
    return collections.Counter(_number(each[0]) if each.lastgroup == "number" else each[0] for each in required(text))


def with_ascii_digits(text: str) -> str:
    """Returns the text with the digits 0 to 9, as English has them, in the place of those of other scripts."""
    return "".join(str(unicodedata.digit(each)) if each.isdecimal() else each for each in text)


def _number(text: str) -> str:
    """Returns the digits of a decimal number; of another one, with its separators."""
    number = with_ascii_digits(text).strip(string.ascii_letters)
    return _digits(number) if _DECIMAL.fullmatch(number) else number


def _digits(text: str) -> str:
    return "".join(filter(str.isdecimal, text))


def _is_percentage(text: str, found: re.Match, end: int, is_numbered: bool) -> bool:
    """Returns whether a percent sign belongs to a number: before it, but not to what ends at `end`, or after it."""
    start = found.start()
    is_after_digit = start > end and text[start - 1].isdigit()
    return found[0][0] == "%" and (is_after_digit or (not is_numbered and bool(_NUMBERED.fullmatch(found[0]))))


def _is_required(found: re.Match, ended: set[str]) -> bool:
    if found.lastgroup == "number":
        return len(_digits(found[0])) >= _FEWEST_DIGITS
    if found.lastgroup == "tag":
        return _is_markup(found[0], ended)
    return found.lastgroup is not None


def _is_markup(tag: str, ended: set[str]) -> bool:
    """Returns whether a tag ends something, has attributes or no end, or is among those that are `ended`."""
    name = _NAME.match(tag)
    return bool(name) and (tag.endswith("/>") or '="' in tag or name[1].lower() in ended | set(_WITHOUT_END))
