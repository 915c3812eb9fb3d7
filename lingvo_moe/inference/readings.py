"""How a line is read: as the text of corpora is written, in parts that fit the model, and in more than one way.

Corpora are cleaned, so a model has hardly seen capitals, the marks of accelerators, invisible characters and symbols
that its tokenizer does not know. It copies addresses badly.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lingvo_moe.data.cleaning import tidy
from lingvo_moe.data.tokenizer import Tokenizer
from lingvo_moe.inference.accelerators import without_accelerator
from lingvo_moe.inference.addresses import restore, shorten
from lingvo_moe.inference.capitals import lower_case, upper_case
from lingvo_moe.inference.sentence_splitting import segment
from lingvo_moe.inference.translation import Translation, join
from lingvo_moe.inference.unknown_symbols import Framed, take_out

_log = logging.getLogger(__name__)
_MAX_NAMED = 10  # lines in a warning; a long file may have hundreds


class Reading(NamedTuple):
    """A way to read a line.

    Attributes:
      parts: what the model reads, each short enough.
      addresses: what short addresses in the parts stand for.
    """

    parts: list[str]
    addresses: tuple[str, ...] = ()

    def translations(self, known: Mapping[str, list[Translation]]) -> list[Translation] | None:
        """Returns the translations of the line, best first; None if the best one lacks an address (others may)."""
        joined = join([known[part] for part in self.parts])
        if not self.addresses:
            return joined
        restored = [restore(each.text, self.addresses) for each in joined]
        if not restored[0][1]:
            return None
        return [dataclasses.replace(each, text=text) for each, (text, _) in zip(joined, restored, strict=True)]


class Line(NamedTuple):
    """A line.

    Attributes:
      frame: the symbols around it.
      readings: the ways to read it, at least one of them without short addresses.
      in_capitals: whether the line is in capitals; its translation is then, too.
    """

    frame: Framed
    readings: list[Reading]
    in_capitals: bool = False

    @property
    def texts(self) -> list[str]:
        """All that the model reads."""
        return [part for reading in self.readings for part in reading.parts]

    def translations(self, known: Mapping[str, list[Translation]]) -> list[Translation]:
        """Returns the translations of one reading, within the frame.

        That is the one whose best translation has the highest confidence, among those with short addresses if they have
        kept them.
        """
        found = [
            (bool(reading.addresses), translations)
            for reading in self.readings
            if (translations := reading.translations(known))
        ]
        _, best = max(found, key=lambda one: (one[0], one[1][0].confidence))
        return [dataclasses.replace(each, text=self.frame.around(self._in_case(each.text))) for each in best]

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
        framed = take_out([tidy(sentence) for sentence in sentences], self._tokenizer)
        texts = [without_accelerator(frame.text, self._tokenizer) for frame in framed]
        lines, too_long = [], []
        for number, (frame, text, fits) in enumerate(zip(framed, texts, self.fits(texts)), start=first):
            readings, truncated = self._readings(text, fits)
            shortened, addresses = shorten(text)
            if addresses:
                of_shortened, truncated = self._readings(
                    shortened, self._count_tokens(shortened) <= self._limit, addresses
                )
                readings = of_shortened + readings
            lines.append(Line(frame, readings, in_capitals=lower_case(text) is not None))
            if truncated:
                too_long.append(number)
        if too_long:
            _log.warning(
                "%s: a sentence has more than %d tokens; its end is not translated. Split it, or pass "
                "--set input.source_length=N.",
                *(line_list(too_long), self._limit),
            )
        return lines

    def _readings(self, text: str, fits: bool, addresses: tuple[str, ...] = ()) -> tuple[list[Reading], bool]:
        """Returns the ways to read a text, and whether a sentence of it loses its end.

        Capitals have far more pieces; where they do not fit, the text is read in lower case alone.
        """
        readings, truncated = [Reading([text], addresses)] if fits else [], False
        lowered = lower_case(text)
        if lowered or not fits:
            parts, truncated = segment(lowered or text, self._count_tokens, self._limit)
            readings.append(Reading(parts, addresses))
        return readings, truncated

    def _count_tokens(self, text: str) -> int:
        return len(self._tokenizer.encode([text])[0])


def line_list(numbers: Sequence[int]) -> str:
    """Returns `line 3`, `lines 3, 7` or, of many numbers, the first ones and how many more there are."""
    named = ", ".join(map(str, numbers[:_MAX_NAMED]))
    more = f" and {len(numbers) - _MAX_NAMED} more" if len(numbers) > _MAX_NAMED else ""
    return f"line{'s' * (len(numbers) > 1)} {named}{more}"
