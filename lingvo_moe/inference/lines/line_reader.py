"""Divides lines into texts, and finds the ways to read these."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from lingvo_moe.data.corpora.cleaning import tidy
from lingvo_moe.data.tokenizer import Tokenizer
from lingvo_moe.inference.lines import (
    bold_marks,
    compatibility_characters,
    dates,
    field_lists,
    positional_formats,
    single_digits,
    written_letters,
)
from lingvo_moe.inference.lines.accelerators import without_accelerator
from lingvo_moe.inference.lines.capitals import lower_cases
from lingvo_moe.inference.lines.english import is_english
from lingvo_moe.inference.lines.escaped_quotes import Unescaped, unescape
from lingvo_moe.inference.lines.kept_text import ADDRESS, count_required, in_english, required
from lingvo_moe.inference.lines.line_parts import LineParts, divide
from lingvo_moe.inference.lines.quoted_words import take_off
from lingvo_moe.inference.lines.readings import Copied, Reading, Text
from lingvo_moe.inference.lines.sentence_splitting import has_many_sentences, segment
from lingvo_moe.inference.lines.short_addresses import Shortened, shorten
from lingvo_moe.inference.lines.translation import Translation, join
from lingvo_moe.inference.lines.unknown_symbols import Framed, take_out
from lingvo_moe.inference.lines.variants import variants


class Plain(NamedTuple):
    """A text without the backslashes before its quotes, and with tags for the marks of bold text."""

    unescaped: Unescaped
    tagged: bold_marks.Tagged

    @classmethod
    def of(cls, text: str) -> Plain:
        """Returns the plain text of a text."""
        unescaped = unescape(text)
        return cls(unescaped, bold_marks.tag(unescaped.text))

    @property
    def text(self) -> str:
        """The plain text."""
        return self.tagged.text

    def undo(self, translation: str) -> str:
        """Returns a translation with the backslashes, the marks, and the characters that tokenizers replace."""
        restored = compatibility_characters.restore(self.unescaped.text, self.tagged.mark(translation))
        return self.unescaped.escape(restored)


class Line(NamedTuple):
    """A line.

    Attributes:
      original: as it was given.
      divided: its parts, with quotes that may have a backslash, and marks of bold text.
      plain: by each different part, the part without these.
      texts: likewise, the ways to read it, or that it is copied.
    """

    original: str
    divided: LineParts
    plain: dict[str, Plain]
    texts: dict[str, Text | Copied]

    @property
    def is_copied(self) -> bool:
        """Whether it is English already."""
        return all(isinstance(text, Copied) for text in self.texts.values())

    @property
    def inputs(self) -> list[str]:
        """All that the model reads at first."""
        return [each for text in self.texts.values() for each in text.inputs]

    def inputs_read_again(self, known: Mapping[str, list[Translation]]) -> list[str]:
        """Returns what the model reads besides; `known` has the `inputs`."""
        return [each for text in self.texts.values() for each in text.inputs_read_again(known)]

    def translations(self, known: Mapping[str, list[Translation]]) -> list[Translation]:
        """Returns the different translations of the line, best first.

        Args:
          known: the translations of `inputs`, and of `inputs_read_again`.
        """
        if self.is_copied and written_letters.decode(self.original) != self.original:
            return [Translation(self.original, 0.0)]
        found = {
            part: [
                dataclasses.replace(each, text=self.plain[part].undo(each.text)) for each in text.translations(known)
            ]
            for part, text in self.texts.items()
        }
        different: dict[str, Translation] = {}
        for each in join([found[wrapped.text] for wrapped in self.divided.texts], self.divided.around):
            different.setdefault(each.text, each)
        return list(different.values())


class LineReader:
    """Finds the ways to read lines."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        limit: int,
        english: Tokenizer | None = None,
        reread_below: float = 0.0,
        into_english: bool = True,
    ):
        """Makes a reader for a model.

        Args:
          tokenizer: that of the source.
          limit: the largest number of tokens that the model reads, without eos.
          english: that of the target, to find and copy English texts; None to translate them.
          reread_below: the confidence below which texts are read in other ways, too, see `variants`.
          into_english: whether translations are in English, which has its own way to write numbers, dates and quotes.
        """
        self._tokenizer, self._limit = tokenizer, limit
        self._pieces = tokenizer.without_language()  # of words
        self._english, self._reread_below = english, reread_below
        self._into_english = into_english

    def fits(self, texts: Sequence[str]) -> list[bool]:
        """Returns for each text whether the model can read it whole."""
        return [len(tokens) <= self._limit for tokens in self._tokenizer.encode(texts)]

    def lines(self, sentences: Sequence[str]) -> list[Line]:
        """Returns the ways to read each line. Equal parts, which a table has many of, are read once."""
        written = [self._as_a_model_reads(sentence) for sentence in sentences]
        divided = [divide(sentence, self._into_english) for sentence in written]
        parts = [list(dict.fromkeys(wrapped.text for wrapped in line.texts)) for line in divided]
        plain = {part: Plain.of(part) for part in dict.fromkeys(itertools.chain.from_iterable(parts))}
        originals = [each.text for each in plain.values()]
        framed = [
            self._unquoted(frame._replace(text=without_accelerator(frame.text, self._pieces)))
            for frame in take_out([tidy(original) for original in originals], self._pieces)
        ]
        read = dict(zip(plain, self._copied_or_read(originals, framed), strict=True))
        return [
            Line(sentence, line, {part: plain[part] for part in own}, {part: read[part] for part in own})
            for sentence, line, own in zip(sentences, divided, parts, strict=True)
        ]

    def _as_a_model_reads(self, sentence: str) -> str:
        """Returns a line with the letters that it writes otherwise, and into English with dates in numbers."""
        decoded = written_letters.decode(sentence)
        return dates.with_numbers(decoded) if self._into_english else decoded

    def _unquoted(self, frame: Framed) -> Framed:
        return take_off(frame) if self._into_english else frame

    def _copied_or_read(self, originals: Sequence[str], framed: Sequence[Framed]) -> list[Text | Copied]:
        """Returns each text, English ones as they were, the others to be read within their frame."""
        are_english = [bool(self._english) and is_english(frame.text, self._english) for frame in framed]
        read = self._texts([frame for frame, english in zip(framed, are_english, strict=True) if not english])
        return [
            Copied(original) if english else next(read)
            for original, english in zip(originals, are_english, strict=True)
        ]

    def _texts(self, framed: Sequence[Framed]) -> Iterator[Text]:
        """Yields the ways to read each text."""
        for frame, fits in zip(framed, self.fits([frame.text for frame in framed]), strict=True):
            readings = self._first_readings(frame.text, fits)
            read_again = functools.partial(self._read_again, frame.text)
            yield Text(frame, readings, bool(lower_cases(frame.text)), self._into_english, read_again)

    def _first_readings(self, text: str, fits: bool | None = None) -> list[Reading]:
        readings = self._readings(Shortened(text, ()), fits)
        in_turn = positional_formats.formats(text)
        if len(set(in_turn)) < len(in_turn):  # whether equal ones change places is seen in no translation
            readings = self._numbered(text) + readings
        addresses = list(ADDRESS.finditer(text))
        return self._readings(shorten(text, addresses)) + readings if addresses else readings

    def _read_again(self, text: str, best: Translation) -> list[Reading]:
        """Returns other ways to read a text whose best translation is not intact, or doubtful."""
        if not best.is_intact:
            again = self._shortened(text) + self._fields(text)
            if again or count_required(text):
                return again
        is_doubtful = not best.is_intact or best.confidence < self._reread_below
        return self._variants(text) if self._reread_below and is_doubtful else []

    def _shortened(self, text: str) -> list[Reading]:
        """Returns ways to read a text with short addresses in the place of all that is required.

        There are none if these are addresses alone, and where a digit follows one: `<b>5 Dateien</b>`.
        """
        needed = sorted([*required(text), *single_digits.find(text)], key=re.Match.start)
        if all(each.lastgroup == "address" for each in needed):
            return []
        originals = tuple(
            each[0] if each.lastgroup not in ("number", None) or not self._into_english else in_english(each[0])
            for each in needed
        )
        return self._readings(Shortened(shorten(text, needed).text, originals))

    def _fields(self, text: str) -> list[Reading]:
        """Returns the way to read a list field by field; none of another text, or where a field is too long."""
        listed = field_lists.divide(text)
        if listed is None or any(self._count_tokens(field) > self._limit for field in listed.fields):
            return []
        return [Reading(listed.fields, separator=listed.separator)]

    def _numbered(self, text: str) -> list[Reading]:
        """Returns ways to read a text with numbers in the formats of values in turn."""
        readings = self._readings(Shortened(positional_formats.number(text), ()))
        undo = positional_formats.without_numbers
        return [each._replace(undo=undo, is_numbered=True) for each in readings if not each.is_cut]

    def _variants(self, text: str) -> list[Reading]:
        """Returns ways to read the other ways to write a text, which may have more tokens; none of them is cut."""
        wanted = count_required(text)
        return [
            reading._replace(undo=variant.undo, wanted=wanted)
            for variant in variants(text)
            for reading in self._first_readings(variant.text)
            if not reading.is_cut
        ]

    def _readings(self, given: Shortened, fits: bool | None = None) -> list[Reading]:
        """Returns the ways to read a text: none if its short addresses are ambiguous.

        Capitals have far more pieces; where they do not fit, the text is read in lower case alone.
        """
        text, originals = given
        fits = self._count_tokens(text) <= self._limit if fits is None else fits
        lowered = lower_cases(text)
        read = [text, *lowered] if fits or not lowered else lowered
        is_whole = fits and not has_many_sentences(text)
        readings = [
            Reading([each], originals) if is_whole and each is text else self._divided(each, originals) for each in read
        ]
        return [reading for reading in readings if reading.is_unambiguous]

    def _divided(self, text: str, originals: tuple[str, ...]) -> Reading:
        parts, is_cut = segment(text, self._count_tokens, self._limit)
        return Reading(parts, originals, is_cut)

    def _count_tokens(self, text: str) -> int:
        return len(self._tokenizer.encode([text])[0])
