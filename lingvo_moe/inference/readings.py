"""How a text is read: as the text of corpora is written, in parts that fit the model, and in more than one way.

Corpora are cleaned, so a model has hardly seen capitals, the marks of accelerators, invisible characters and symbols
that its tokenizer does not know. It copies addresses badly, and loses some placeholders, tags, codes and numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lingvo_moe.inference.capitals import upper_case
from lingvo_moe.inference.kept_text import count_required
from lingvo_moe.inference.short_addresses import restore
from lingvo_moe.inference.translation import Translation, join
from lingvo_moe.inference.unknown_symbols import Framed


class Reading(NamedTuple):
    """A way to read a text.

    Attributes:
      parts: what the model reads, each short enough.
      originals: what short addresses in the parts stand for.
      is_cut: whether a part is the beginning of a sentence that is too long.
    """

    parts: list[str]
    originals: tuple[str, ...] = ()
    is_cut: bool = False

    def translations(self, known: Mapping[str, list[Translation]]) -> list[Translation]:
        """Returns the translations of the text, best first."""
        return [
            dataclasses.replace(each, text=restore(each.text, self.originals), is_cut=self.is_cut)
            for each in join([known[part] for part in self.parts])
        ]


class Text(NamedTuple):
    """A text and the ways to read it.

    Attributes:
      frame: the symbols around it.
      readings: the ways to read it, at least one of them without short addresses.
      in_capitals: whether the text is in capitals; its translation is then, too.
      fallbacks: ways to read it if no translation of the readings is intact.
    """

    frame: Framed
    readings: list[Reading]
    in_capitals: bool = False
    fallbacks: Sequence[Reading] = ()

    @property
    def parts(self) -> list[str]:
        """All that the model reads, without `fallbacks`."""
        return [part for reading in self.readings for part in reading.parts]

    def parts_of_fallbacks(self, known: Mapping[str, list[Translation]]) -> list[str]:
        """Returns all that the model reads of the fallbacks, if they are needed; `known` has the `parts`."""
        needed = () if self._best(self.readings, known)[0].is_intact else self.fallbacks
        return [part for reading in needed for part in reading.parts]

    def translations(self, known: Mapping[str, list[Translation]]) -> list[Translation]:
        """Returns the translations of one reading, intact ones first, within the frame.

        That is the reading whose first translation is intact; of several, one with short addresses, and of these the
        most confident. If there is none, it is one without short addresses.

        Args:
          known: the translations of `parts`, and of `parts_of_fallbacks`.
        """
        best = self._best(self.readings, known)
        if not best[0].is_intact:  # not whenever they are known: equal fallbacks of other texts must change nothing
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
