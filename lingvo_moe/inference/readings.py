"""How a line is read: as the text of corpora is written, in parts that fit the model, and in more than one way.

Corpora are cleaned, so a model has hardly seen capitals, the marks of accelerators, invisible characters and symbols
that its tokenizer does not know. It copies addresses badly, and loses some placeholders and tags.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lingvo_moe.data.cleaning import tidy
from lingvo_moe.data.tokenizer import Tokenizer
from lingvo_moe.inference.accelerators import without_accelerator
from lingvo_moe.inference.capitals import lower_case, upper_case
from lingvo_moe.inference.kept_text import ADDRESS, count_required, required
from lingvo_moe.inference.sentence_splitting import segment
from lingvo_moe.inference.short_addresses import Shortened, restore, shorten
from lingvo_moe.inference.translation import Translation, join
from lingvo_moe.inference.unknown_symbols import Framed, take_out

_log = logging.getLogger(__name__)
_MAX_NAMED = 10  # lines in a warning; a long file may have hundreds


class Reading(NamedTuple):
    """A way to read a line.

    Attributes:
      parts: what the model reads, each short enough.
      originals: what short addresses in the parts stand for.
    """

    parts: list[str]
    originals: tuple[str, ...] = ()

    def translations(self, known: Mapping[str, list[Translation]]) -> list[Translation]:
        """Returns the translations of the line, best first."""
        joined = join([known[part] for part in self.parts])
        return [dataclasses.replace(each, text=restore(each.text, self.originals)) for each in joined]


class Line(NamedTuple):
    """A line.

    Attributes:
      frame: the symbols around it.
      readings: the ways to read it, at least one of them without short addresses.
      in_capitals: whether the line is in capitals; its translation is then, too.
      fallbacks: ways to read it if no translation of the readings is intact.
    """

    frame: Framed
    readings: list[Reading]
    in_capitals: bool = False
    fallbacks: Sequence[Reading] = ()

    @property
    def texts(self) -> list[str]:
        """All that the model reads, without `fallbacks`."""
        return [part for reading in self.readings for part in reading.parts]

    def texts_of_fallbacks(self, known: Mapping[str, list[Translation]]) -> list[str]:
        """Returns all that the model reads of the fallbacks, if they are needed; `known` has the `texts`."""
        needed = () if self._best(self.readings, known)[0].is_intact else self.fallbacks
        return [part for reading in needed for part in reading.parts]

    def translations(self, known: Mapping[str, list[Translation]]) -> list[Translation]:
        """Returns the translations of one reading, intact ones first, within the frame.

        That is the reading whose first translation is intact; of several, one with short addresses, and of these the
        most confident. If there is none, it is one without short addresses.

        Args:
          known: the translations of `texts`, and of `texts_of_fallbacks`.
        """
        best = self._best(self.readings, known)
        if not best[0].is_intact:  # not whenever they are known: equal fallbacks of other lines must change nothing
            best = self._best([*self.readings, *self.fallbacks], known)
        return [dataclasses.replace(each, text=self.frame.around(self._in_case(each.text))) for each in best]

    def _best(self, readings: Sequence[Reading], known: Mapping[str, list[Translation]]) -> list[Translation]:
        wanted = count_required(self.frame.text)
        found = []
        for reading in readings:
            checked = [
                dataclasses.replace(each, is_intact=count_required(each.text) == wanted)
                for each in reading.translations(known)
            ]
            intact_first = sorted(checked, key=lambda each: not each.is_intact)
            best = intact_first[0]
            found.append(((best.is_intact, bool(reading.originals) == best.is_intact, best.confidence), intact_first))
        return max(found, key=lambda one: one[0])[1]

    def _in_case(self, translation: str) -> str:
        return upper_case(translation) if self.in_capitals else translation


class LineReader:
    """Finds the ways to read lines."""

    def __init__(self, tokenizer: Tokenizer, limit: int):
        """Takes the source tokenizer, and the largest number of tokens that the model reads, without eos."""
        self._tokenizer, self._limit = tokenizer, limit

    def fits(self, texts: Sequence[str]) -> list[bool]:
        """Returns for each text whether the model can read it whole."""
        return [len(tokens) <= self._limit for tokens in self._tokenizer.encode(texts)]

    def lines(self, sentences: Sequence[str], first: int = 1) -> list[Line]:
        """Returns the ways to read each line. A warning names the lines with a sentence that loses its end.

        Args:
          sentences: the lines.
          first: the number of the first of them.
        """
        taken_out = take_out([tidy(sentence) for sentence in sentences], self._tokenizer)
        framed = [frame._replace(text=without_accelerator(frame.text, self._tokenizer)) for frame in taken_out]
        texts = [frame.text for frame in framed]
        lines, too_long = [], []
        for number, (frame, text, fits) in enumerate(zip(framed, texts, self.fits(texts)), start=first):
            readings, truncated = self._readings(Shortened(text, ()), fits)
            addresses, needed = list(ADDRESS.finditer(text)), required(text)
            if addresses:
                with_short, truncated = self._readings(shorten(text, addresses))
                readings = with_short + readings
            fallbacks = self._readings(shorten(text, needed))[0] if len(needed) > len(addresses) else ()
            lines.append(Line(frame, readings, lower_case(text) is not None, fallbacks))
            if truncated:
                too_long.append(number)
        if too_long:
            _log.warning(
                "%s: a sentence has more than %d tokens; its end is not translated. Split it, or pass "
                "--set input.source_length=N.",
                *(line_list(too_long), self._limit),
            )
        return lines

    def _readings(self, given: Shortened, fits: bool | None = None) -> tuple[list[Reading], bool]:
        """Returns the ways to read a text, and whether a sentence of it loses its end.

        Capitals have far more pieces; where they do not fit, the text is read in lower case alone.
        """
        text, originals = given
        fits = self._count_tokens(text) <= self._limit if fits is None else fits
        readings, truncated = [Reading([text], originals)] if fits else [], False
        lowered = lower_case(text)
        if lowered or not fits:
            parts, truncated = segment(lowered or text, self._count_tokens, self._limit)
            readings.append(Reading(parts, originals))
        return readings, truncated

    def _count_tokens(self, text: str) -> int:
        return len(self._tokenizer.encode([text])[0])


def line_list(numbers: Sequence[int]) -> str:
    """Returns `line 3`, `lines 3, 7` or, of many numbers, the first ones and how many more there are."""
    named = ", ".join(map(str, numbers[:_MAX_NAMED]))
    more = f" and {len(numbers) - _MAX_NAMED} more" if len(numbers) > _MAX_NAMED else ""
    return f"line{'s' * (len(numbers) > 1)} {named}{more}"
