"""A data source of sentences, from one of paragraphs."""

from __future__ import annotations

import re
from collections.abc import Iterator

from lingvo_moe.data.corpora.catalogs import Entry
from lingvo_moe.data.corpora.sources import CatalogFile, Source
from lingvo_moe.utils.hashes import sha256

_RULES_VERSION = 1  # a part of a corpus's identity: increase it with every change of the rules
_CLOSING = "[\"'”’»)\\]」』）】]*"
# Where a sentence may end. Chinese, Japanese, Devanagari and Arabic sentences may end without a space.
# Only a whole run of points is tried: trying each of its ends would take quadratic time.
SENTENCE_END = re.compile(rf"(?<![.!?…])[.!?…]++{_CLOSING}+\s+|[。！？।؟۔]+{_CLOSING}\s*")
# A single letter (`e.g.`, `z. B.`, `U.S.`), an ordinal (`31. Dezember`), or one of a few words.
_ABBREVIATION = re.compile(
    r"\b(?:[^\W\d_]|\d{1,2}|Dr|Mr|Mrs|St|No|Nr|vs|approx|resp|bzw|ca|evtl|inkl|np|ej|ex|напр)\.\s+$"
)
_LONGEST_ABBREVIATION = 8
_LETTER_OR_DIGIT = re.compile(r"[^\W_]")


class Sentences:
    """Another source, its texts divided into sentences.

    A text is divided if it has as many sentences in both languages; else it is kept whole. For prose: a pair of whole
    paragraphs may exceed a model's length.

    Args:
      source: the source to divide.
      name: for the corpus manifest; None for that of `source`.
    """

    def __init__(self, source: Source, name: str | None = None):
        self._source = source
        self.name, self.size = name or source.name, source.size
        self.skipped_links = 0

    def identity(self) -> str:
        """Returns a hash of the content, which differs from that of the divided source."""
        return sha256(f"sentences {_RULES_VERSION} {self._source.identity()}")

    def files(self) -> Iterator[CatalogFile]:
        """Yields the files of the divided source, with an entry per sentence."""
        for file in self._source.files():
            entries = (sentence for entry in file.entries for sentence in _divided(entry))
            yield file._replace(entries=entries)
        self.skipped_links = self._source.skipped_links


def _divided(entry: Entry) -> Iterator[Entry]:
    english, translation = sentences(entry.english), sentences(entry.translation)
    if len(english) != len(translation):
        yield entry
        return
    for sentence, translated in zip(english, translation):
        yield entry._replace(english=sentence, translation=translated)


def sentences(text: str) -> list[str]:
    """Returns the sentences of a text, which is not divided inside parentheses or where that may be wrong."""
    found, start, tried, depth = [], 0, 0, 0
    # The next letters or digits: searching again from each point would take time with the square of their number.
    first = following = _LETTER_OR_DIGIT.search(text)
    for end in SENTENCE_END.finditer(text):
        depth += _depth(text, tried, end.end())
        tried = end.end()
        if following and following.start() < tried:
            following = _LETTER_OR_DIGIT.search(text, tried)
        if not first or not following:
            break
        if depth <= 0 and first.start() < tried and _ends(text, start, end, following[0]):
            found.append(text[start:tried].strip())
            start, depth, first = tried, 0, following
    return [*found, text[start:].strip()]


def _ends(text: str, start: int, end: re.Match[str], following: str) -> bool:
    """Returns whether the text from `start` on is a sentence: what follows may continue it, after an abbreviation."""
    if text[end.start()] not in ".!?…":  # no space has to follow, and no abbreviation ends like this
        return True
    abbreviation = _ABBREVIATION.search(text, max(start, end.start() - _LONGEST_ABBREVIATION), end.end())
    return not following.islower() and abbreviation is None


def _depth(text: str, start: int, end: int) -> int:
    """Returns how many more parentheses are opened than closed in a part of a text."""
    opened, closed = (sum(text.count(mark, start, end) for mark in marks) for marks in ("(（", ")）"))
    return opened - closed
