"""How a text is read: as the text of corpora is written, in parts that fit the model, and in more than one way.

Corpora are cleaned, so a model has hardly seen capitals, the marks of accelerators, invisible characters and symbols
that its tokenizer does not know. It copies addresses badly, and loses some placeholders, tags, codes and numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from lingvo_moe.inference.lines import single_digits
from lingvo_moe.inference.lines.capitals import upper_case
from lingvo_moe.inference.lines.field_lists import loses_a_field
from lingvo_moe.inference.lines.kept_text import breaks_a_pair, count_required, has_words, with_english_numbers
from lingvo_moe.inference.lines.positional_formats import formats, has_more_numbers, number_as
from lingvo_moe.inference.lines.short_addresses import is_unambiguous, restore, short_numbers
from lingvo_moe.inference.lines.translation import Translation, join
from lingvo_moe.inference.lines.unknown_symbols import Framed

# A translation with this share of another one's confidence is as good.
_AS_CONFIDENT = 0.8
# Tokens of another reading's translation.
_MOST_TIMES, _MOST_ADDED = 2, 5


class Reading(NamedTuple):
    """A way to read a text.

    Attributes:
      inputs: what the model reads, each short enough.
      originals: what short addresses in the inputs stand for.
      is_cut: whether an input is the beginning of a sentence that is too long.
      undo: changes a translation of the inputs to one of the text, see `variants`.
      wanted: what such a translation has to have, see `count_required`; None where it is what each input has.
      is_numbered: whether the inputs number formats that the text has without numbers, see `positional_formats`.
      separator: what is between the inputs.
    """

    inputs: list[str]
    originals: tuple[str, ...] = ()
    is_cut: bool = False
    undo: Callable[[str], str] = str
    wanted: Mapping[str, int] | None = None
    is_numbered: bool = False
    separator: str = " "

    @property
    def is_unambiguous(self) -> bool:
        """Whether the short addresses, if any, can be told from the text; else no translation could be checked."""
        return not self.originals or is_unambiguous(self.inputs, self.originals, self.is_cut)

    def translations(self, known: Mapping[str, list[Translation]]) -> list[Translation]:
        """Returns the translations of the text, intact ones first, else best first."""
        checked = {text: self._intact_first(known[text], text) for text in dict.fromkeys(self.inputs)}
        joined = join([checked[text] for text in self.inputs], self.separator.join)
        found = [dataclasses.replace(each, text=self.undo(each.text), is_cut=self.is_cut) for each in joined]
        if self.wanted is None:
            return found
        text = self.separator.join(self.inputs)
        return [dataclasses.replace(each, is_intact=_is_intact(each.text, self.wanted, text)) for each in found]

    def _intact_first(self, translations: Sequence[Translation], text: str) -> list[Translation]:
        """Returns the translations of one input."""
        original = restore(text, self.originals)
        wanted = count_required(original)
        in_turn = {number for number, each in enumerate(self.originals, 1) if formats(each)}
        checked = []
        for each in translations:
            restored = restore(each.text, self.originals)
            order = [number for number in short_numbers(each.text) if number in in_turn]
            is_intact = order == sorted(order) and _is_intact(restored, wanted, original)
            checked.append(dataclasses.replace(each, text=number_as(original, restored), is_intact=is_intact))
        # One without numbers is for every program, unless it is far less probable.
        in_order = [each.confidence for each in checked if each.is_intact and not has_more_numbers(original, each.text)]
        least = max(in_order, default=0.0) / _AS_CONFIDENT
        return sorted(
            checked,
            key=lambda each: (
                not each.is_intact,
                has_more_numbers(original, each.text) and each.confidence < least,
            ),
        )


def _is_intact(translation: str, wanted: Mapping[str, int], text: str) -> bool:
    """Returns whether a translation of a text has what is wanted, in the order that programs need, and words if needed.

    It must lose no digit that stands alone, no field of a list, and break no pair of quotes or the like, either.
    """
    if count_required(translation) != wanted or single_digits.loses_one(text, translation):
        return False
    if breaks_a_pair(text, translation) or loses_a_field(text, translation):
        return False
    if formats(number_as(text, translation)) not in (formats(text), []):
        return False
    return has_words(translation) or not has_words(text)


class Copied(NamedTuple):
    """A text that is English already.

    Attributes:
      text: what is copied.
    """

    text: str
    inputs = ()

    def inputs_read_again(self, known: Mapping[str, list[Translation]]) -> list[str]:
        """Returns nothing."""
        del known
        return []

    def translations(self, known: Mapping[str, list[Translation]]) -> list[Translation]:
        """Returns the text."""
        del known
        return [Translation(self.text, 0.0)]


@dataclasses.dataclass(frozen=True)
class Text:
    """A text and the ways to read it.

    Attributes:
      frame: the symbols around it.
      readings: the ways to read it, at least one of them without short addresses.
      in_capitals: whether the text is in capitals; its translation is then, too.
      into_english: whether numbers are written as in English where there is no doubt.
      read_again: returns other ways to read it, given the best translation of the readings.
    """

    frame: Framed
    readings: list[Reading]
    in_capitals: bool = False
    into_english: bool = False
    read_again: Callable[[Translation], Sequence[Reading]] = lambda best: ()

    @property
    def inputs(self) -> list[str]:
        """All that the model reads at first."""
        return [text for reading in self.readings for text in reading.inputs]

    def inputs_read_again(self, known: Mapping[str, list[Translation]]) -> list[str]:
        """Returns all that the model reads when it reads the text again; `known` has the `inputs`."""
        again = self.read_again(self._ranked(self.readings, known)[0])
        return [text for reading in again for text in reading.inputs]

    def translations(self, known: Mapping[str, list[Translation]]) -> list[Translation]:
        """Returns the translations of one reading, intact ones first, within the frame.

        That is the reading whose first translation is intact; of several, one with short addresses, and of these the
        most confident. If there is none, it is one without short addresses. A doubtful text stays so: most translations
        of other readings are poor, too, so none has more confidence than the best of the first readings.

        Args:
          known: the translations of `inputs`, and of `inputs_read_again`.
        """
        ranked = self._ranked(self.readings, known)
        if again := self.read_again(ranked[0]):
            best = ranked[0]
            if best.is_intact:
                again = [reading for reading in again if not _is_repetitive(reading.translations(known)[0], best)]
            ranked = self._ranked([*self.readings, *again], known)
            if best.is_intact:
                ranked = [
                    dataclasses.replace(each, confidence=min(each.confidence, best.confidence)) for each in ranked
                ]
        return list(map(self._finished, ranked))

    def _ranked(self, readings: Sequence[Reading], known: Mapping[str, list[Translation]]) -> list[Translation]:
        """Returns the translations of the best reading."""
        found = [(reading, reading.translations(known)) for reading in readings]
        plain = max((each[0].confidence for reading, each in found if not reading.is_numbered), default=0.0)
        found = [one for one in found if not one[0].is_numbered or self._changes_places(one[1][0], plain)]
        _, ranked = max(
            found,
            key=lambda one: (
                one[1][0].is_intact,
                bool(one[0].originals or one[0].is_numbered) == one[1][0].is_intact,
                one[1][0].confidence,
            ),
        )
        return ranked

    def _changes_places(self, numbered: Translation, plain: float) -> bool:
        """Returns whether a translation shows that formats change places; `plain` is the confidence without numbers."""
        is_confident = numbered.confidence >= _AS_CONFIDENT * plain
        return numbered.is_intact and is_confident and has_more_numbers(self.frame.text, numbered.text)

    def _finished(self, translation: Translation) -> Translation:
        """Returns a translation of the text within the frame; a user should look at one with numbered formats."""
        text, original = translation.text, self.frame.text
        written = with_english_numbers(original, text) if self.into_english else text
        in_case = upper_case(written) if self.in_capitals else written
        is_intact = translation.is_intact and not has_more_numbers(original, text)
        return dataclasses.replace(translation, text=self.frame.around(in_case), is_intact=is_intact)


def _is_repetitive(translation: Translation, other: Translation) -> bool:
    """Returns whether a translation has far more tokens than another one: a loop, of whose tokens a model is sure."""
    return translation.num_tokens > _MOST_TIMES * other.num_tokens + _MOST_ADDED
