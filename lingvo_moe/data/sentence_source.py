"""A data source of sentences, from one of paragraphs."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

from lingvo_moe.data.catalogs import Entry
from lingvo_moe.data.sources import CatalogFile, Source

_RULES_VERSION = 1  # a part of a corpus's identity: increase it with every change of the rules
_CLOSING = "[\"'”’»)\\]」』）】]*"
# Where a sentence may end. Chinese, Japanese, Devanagari and Arabic sentences may end without a space.
# Only a whole run of points is tried: trying each of its ends would take quadratic time.
SENTENCE_END = re.compile(rf"(?<![.!?…])[.!?…]++{_CLOSING}+\s+|[。！？।؟۔]+{_CLOSING}\s*")
# A single letter (`e.g.`, `z. B.`, `U.S.`), an ordinal (`31. Dezember`), or one of a few words.
_ABBREVIATION = re.compile(
    r"\b(?:[^\W\d_]|\d{1,2}|Dr|Mr|Mrs|St|No|Nr|vs|approx|resp|bzw|ca|evtl|inkl|np|ej|ex|напр)\.\s+$"
)
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
        return hashlib.sha256(f"sentences {_RULES_VERSION} {self._source.identity()}".encode()).hexdigest()

    def files(self) -> Iterator[CatalogFile]:
        """Yields the files of the divided source, with an entry per sentence."""
        for file in self._source.files():
            entries = (sentence for entry in file.entries for sentence in _divided(entry))
            yield file._replace(entries=entries)
        self.skipped_links = self._source.skipped_links


def _divided(entry: Entry) -> Iterator[Entry]:
    english, translation = _sentences(entry.english), _sentences(entry.translation)
    if len(english) != len(translation):
        yield entry
        return
    for sentence, translated in zip(english, translation):
        yield entry._replace(english=sentence, translation=translated)


def _sentences(text: str) -> list[str]:
    """Returns the sentences of a text, which is not divided inside parentheses or where that may be wrong."""
    sentences, start = [], 0
    for end in SENTENCE_END.finditer(text):
        sentence = text[start : end.end()]
        if _ends(sentence, text[end.end() :], is_spaced=text[end.start()] in ".!?…"):
            sentences.append(sentence.strip())
            start = end.end()
    return [*sentences, text[start:].strip()]


def _ends(sentence: str, rest: str, is_spaced: bool) -> bool:
    """Returns whether `sentence` is one: `rest` may continue it, after an abbreviation for example."""
    first = _LETTER_OR_DIGIT.search(rest)
    if first is None or not _LETTER_OR_DIGIT.search(sentence):
        return False
    if is_spaced and (first[0].islower() or _ABBREVIATION.search(sentence)):
        return False
    return sum(map(sentence.count, "(（")) <= sum(map(sentence.count, ")）"))
