r"""Divides a line at what is copied as it is: white space at its ends, tabs, columns, escapes such as `\n`, ICU syntax.

In the corpora, escapes are the characters that they stand for, and white space is a single space; a model has hardly
seen others. A line end inside of a sentence only wraps it: the sentence is translated as a whole.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable
from typing import NamedTuple

from lingvo_moe.data.corpora.cleaning import ENTITY
from lingvo_moe.inference.lines import icu_messages
from lingvo_moe.inference.lines.kept_text import KEPT, has_words, in_english

_RUN = re.compile(r"(?:\s|(?<!\\)\\[nrt]|(?<=\s)[‹›](?=\s))++")
# More than spaces: tabs, line ends, escapes, signs between the names of menus; and spaces that make a column.
_IS_SEPARATOR = re.compile(r"[\t-\r\x1c-\x1f\x85\u2028\u2029\\‹›]|\s{3}")
_LONGEST_ESCAPE = 2
_WRAP = re.compile(r" ?(?:\\r)?\\n ?")
_END = re.compile(r"(?:[.!?…。！？।؟۔][\"'”“’»)\]」』]*|[:;：；>}])\Z")
_ITEM = re.compile(r"[-*•–—#>]|\(?\w{1,2}[.)]\s")
# Fewer characters before a line end are a title or an item of a list, if a capital or a letter without case follows.
_SHORTEST_WRAPPED, _SHORTEST_BEFORE_CAPITAL, _SHORTEST_CHINESE = 20, 40, 8
_LONGEST_ITEM = 8  # what _ITEM may match
_CHINESE = re.compile("[\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef]")  # and Japanese, which have no spaces
_NUMBER_SIGN, _PRINTF = "#", "%d"  # the latter is in many texts of corpora
_GREEK = re.compile("[Ͱ-Ͽἀ-῾]")


class Wrapped(NamedTuple):
    """A text, and where it was wrapped.

    Attributes:
      text: the text without line ends.
      ends: each line end, and the share of the text that is before it.
      has_number_sign: whether `%d` stands for `#`, which is the number in a plural form of ICU.
    """

    text: str
    ends: tuple[tuple[float, str], ...] = ()
    has_number_sign: bool = False

    def wrap(self, translation: str) -> str:
        """Returns a translation with each line end in the place of the space that is nearest to its share."""
        if self.has_number_sign:
            translation = translation.replace(_PRINTF, _NUMBER_SIGN)
        spaces = [found.start() for found in re.finditer(" ", translation)]
        taken, first = {}, 0
        for share, end in self.ends:
            at = bisect.bisect_left(spaces, share * len(translation), first)
            nearest = min(
                spaces[max(first, at - 1) : at + 1], key=lambda at: abs(at - share * len(translation)), default=None
            )
            if nearest is not None:
                taken[nearest] = end
                first = spaces.index(nearest, max(first, at - 1)) + 1
        return "".join(taken.get(at, character) for at, character in enumerate(translation)) if taken else translation


class LineParts(NamedTuple):
    """The parts of a line.

    Attributes:
      texts: what is to be translated, at least one text; of a line without words, an empty one.
      between: what is before, between and after the texts.
    """

    texts: list[Wrapped]
    between: list[str]

    def around(self, translations: list[str]) -> str:
        """Returns the line with a translation in the place of each text."""
        first, *others = self.between
        wrapped = [text.wrap(translation) for text, translation in zip(self.texts, translations, strict=True)]
        return first + "".join(part for pair in zip(wrapped, others, strict=True) for part in pair)


def divide(line: str, numbers_in_english: bool = True) -> LineParts:
    """Divides a line; of a part without words, only digits and decimal points become English, or nothing."""
    texts, between = [], [""]
    pieces = icu_messages.divide(line)
    for text, copied in zip(pieces[::2], [*pieces[1::2], ""], strict=True):
        of_text, (first, *others) = _divide_text(text, in_english if numbers_in_english else str)
        texts += map(_read_number_sign, of_text) if len(pieces) > 1 else of_text
        between[-1] += first
        between += others
        between[-1] += copied
    return LineParts(texts, between) if texts else LineParts([Wrapped("")], [*between, ""])


def _read_number_sign(part: Wrapped) -> Wrapped:
    """Returns a text of an ICU argument with `%d` in the place of `#`, unless it has `%d` of its own."""
    if _NUMBER_SIGN not in part.text or _PRINTF in part.text:
        return part
    return part._replace(text=part.text.replace(_NUMBER_SIGN, _PRINTF), has_number_sign=True)


def _divide_text(line: str, translate_numbers: Callable[[str], str]) -> LineParts:
    """Divides a text without ICU arguments; it may have no texts at all."""
    texts, between, pieces, start, end = [], [""], [], 0, 0
    for run in [*_runs(line), None]:
        stop, after = run.span() if run else (len(line), len(line))
        pieces.append(line[end:stop])
        end = after
        if run and _is_wrap(pieces[-1], run, line):
            pieces.append(run[0])
            continue
        text = _unwrapped(pieces)
        if has_words(text.text):
            texts.append(text)
            between.append(line[stop:end])
        else:
            between[-1] += translate_numbers(line[start:stop]) + line[stop:end]
        pieces, start = [], end
    if texts and _ends_with_semicolon(texts[-1].text):
        text = texts[-1].text[:-1].rstrip()
        between[-1] = texts[-1].text[len(text) :] + between[-1]
        texts[-1] = texts[-1]._replace(text=text)
    return LineParts(texts, between)


def _runs(line: str) -> list[re.Match]:
    """Returns the white space at the ends of a line, and inside of it tabs and escapes with the spaces beside them."""
    runs = [
        run for run in _RUN.finditer(line) if run.start() == 0 or run.end() == len(line) or _IS_SEPARATOR.search(run[0])
    ]
    # Not in `C:\new`.
    kept = [found.span() for found in KEPT.finditer(line) if len(found[0]) > _LONGEST_ESCAPE] if runs else []
    starts = [start for start, _ in kept]
    before = [bisect.bisect_left(starts, run.start()) - 1 for run in runs]
    return [run for run, at in zip(runs, before, strict=True) if at < 0 or run.start() >= kept[at][1]]


def _is_wrap(before: str, run: re.Match, line: str) -> bool:
    """Returns whether a line end is inside of a sentence; `before` is what precedes it up to another one."""
    after = line[run.end() : run.end() + _LONGEST_ITEM]
    if not before or not after or not _WRAP.fullmatch(run[0]) or _END.search(before) or _ITEM.match(after):
        return False
    shortest = _SHORTEST_BEFORE_CAPITAL if after[0].isupper() else _SHORTEST_WRAPPED
    shortest = _SHORTEST_CHINESE if _CHINESE.match(after) else shortest
    return after[0].islower() or (after[0].isalnum() and len(before) >= shortest)


def _unwrapped(pieces: list[str]) -> Wrapped:
    """Returns a text of lines and, between them, the line ends that wrap it."""
    text, ends = pieces[0], []
    for end, line in zip(pieces[1::2], pieces[2::2], strict=True):
        text += "" if _CHINESE.match(line) and _CHINESE.match(text[-1:]) else " "
        ends.append((len(text), end))
        text += line
    return Wrapped(text, tuple((length / len(text), end) for length, end in ends))


def _ends_with_semicolon(text: str) -> bool:
    """Returns whether a text ends with a semicolon that is none of an entity, of code or of Greek (a question mark).

    A model makes a question mark of it in other languages, too.
    """
    if not text.endswith(";") or _GREEK.search(text) or text[-2:-1] in ")}":
        return False
    return not any(found.end() == len(text) for found in ENTITY.finditer(text))
