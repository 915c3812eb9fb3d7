"""What a program reads in a line, and a translation must keep as it is: placeholders, tags, entities, addresses."""

from __future__ import annotations

import collections
import re

from lingvo_moe.data.cleaning import ENTITY, PLACEHOLDER

# The letters of scripts that have spaces between words: in `https://a.de/를` the address ends before the Korean letter.
_IN_ADDRESS = r"[A-Za-z0-9À-ɏͰ-ϿЀ-ԯ%&#@~$+=/_:?!.,;*'-]"
_AT_ITS_END = r"[A-Za-z0-9À-ɏͰ-ϿЀ-ԯ%&#@~$+=/-]"
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
KEPT = re.compile("|".join([_TAG, ENTITY.pattern, ADDRESS.pattern, _ESCAPE, _VARIABLE, _VALUE]))
_REQUIRED = re.compile("|".join([_TAG, ADDRESS.pattern, _VARIABLE, _VALUE]))
_NUMBERED = re.compile(r"%(\d{1,2})")
_NAME = re.compile(r"</?\s*([A-Za-z][\w:.-]*)")
_WITHOUT_END = ("br", "hr", "img", "li", "p")


def required(text: str) -> list[re.Match]:
    """Finds what a translation has to have exactly as often: placeholders, addresses, and the tags of markup.

    Entities are not among them, which stand for characters of a language (`&nbsp;:`); neither are names between angle
    brackets that are translated (`<Datei>`), and percentages (`%50`, `100%ig`).
    """
    found = [each for each in _REQUIRED.finditer(text) if each[0] != "%%"]
    ended = {name[1].lower() for each in found if each[0].startswith("</") and (name := _NAME.match(each[0]))}
    numbers = {int(number[1]) for each in found if (number := _NUMBERED.fullmatch(each[0]))}
    is_numbered = numbers == set(range(1, len(numbers) + 1))
    kept, end = [], 0
    for each in found:
        is_percentage = _is_after_digit(text, each, end) or (not is_numbered and _NUMBERED.fullmatch(each[0]))
        if not is_percentage and (each[0][0] != "<" or _is_markup(each[0], ended)):
            kept.append(each)
        end = each.end()
    return kept


def count_required(text: str) -> collections.Counter[str]:
    """Returns how often a translation has to have each text that is `required`."""
    return collections.Counter(each[0] for each in required(text))


def _is_after_digit(text: str, found: re.Match, end: int) -> bool:
    """Whether a percent sign belongs to the number before it, which does not belong to what ends at `end`."""
    start = found.start()
    return found[0][0] == "%" and start > end and text[start - 1].isdigit()


def _is_markup(tag: str, ended: set[str]) -> bool:
    """Whether a tag ends something, has attributes or no end, or is among those that are `ended`."""
    name = _NAME.match(tag)
    return bool(name) and (tag.endswith("/>") or '="' in tag or name[1].lower() in ended | set(_WITHOUT_END))
