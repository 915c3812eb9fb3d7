"""Reads the pairs of data sources: cleans and deduplicates them, and counts what is not used."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import itertools
from collections.abc import Collection, Iterator, Sequence

from lingvo_moe.data import languages
from lingvo_moe.data.corpora import catalogs, cleaning, sources
from lingvo_moe.data.corpora.corpus_writer import Pair
from lingvo_moe.data.corpora.rejection import Rejection
from lingvo_moe.utils import progress


@dataclasses.dataclass
class CollectedPairs:
    """The clean pairs of all languages, and the counts of what was not used.

    Attributes:
      pairs: by language, deduplicated.
      read: the number of entries read, by language.
      rejected: the number of rejected entries, by language and reason.
      english_labels: entries skipped because their language is English, by label.
      unlabelled: entries skipped because their language is not known, by file.
      skipped_links: see `sources.Source`, by the source's name, which several sources may have.
    """

    pairs: dict[str, set[Pair]] = dataclasses.field(default_factory=lambda: collections.defaultdict(set))
    read: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    rejected: dict[str, collections.Counter[str]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(collections.Counter)
    )
    english_labels: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    unlabelled: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    skipped_links: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def add_counts(self, other: CollectedPairs):
        """Adds the counts of other pairs."""
        for mine, theirs in (
            (self.read, other.read),
            (self.english_labels, other.english_labels),
            (self.unlabelled, other.unlabelled),
            (self.skipped_links, other.skipped_links),
        ):
            mine.update(theirs)
        for language, counts in other.rejected.items():
            self.rejected[language].update(counts)


def collect_pairs(read_from: Sequence[sources.Source], selected: Collection[str] = ()) -> CollectedPairs:
    """Reads, cleans and deduplicates the entries of all sources, of the selected languages alone (empty: of all)."""
    collected = CollectedPairs()
    texts: dict[str, str] = {}  # one string object per English text, however many languages translate it
    with progress.bar("reading catalogs", sum(source.size for source in read_from) // 1000, "kB") as advance:
        for source, files in _opened_ahead(read_from):
            done = 0.0
            for file in files:
                for entry in sources.checked(file.entries, file.name):
                    if languages.is_selected(entry.language, selected):
                        _add_entry(entry, file.name, collected, texts)
                advance(int((done + file.size) / 1000) - int(done / 1000), source.name)
                done += file.size
            advance((source.size - int(done)) // 1000)
            collected.skipped_links[source.name] += source.skipped_links
    return collected


def _opened_ahead(
    read_from: Sequence[sources.Source],
) -> Iterator[tuple[sources.Source, Iterator[sources.CatalogFile]]]:
    """Yields each source and its files; while one is read, a thread gets the first file of the next.

    A package is unpacked, by another program, before its first file.
    """

    def open_source(source: sources.Source) -> tuple[list[sources.CatalogFile], Iterator[sources.CatalogFile]]:
        files = iter(source.files())
        return [*itertools.islice(files, 1)], files

    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
        ahead = [thread.submit(open_source, source) for source in read_from[:1]]
        for number, source in enumerate(read_from, 1):
            first, files = ahead.pop().result()
            ahead += [thread.submit(open_source, following) for following in read_from[number : number + 1]]
            yield source, itertools.chain(first, files)


def _add_entry(entry: catalogs.Entry, file: str, collected: CollectedPairs, texts: dict[str, str]):
    """Adds an entry to the pairs, or to the counts of what is skipped or rejected."""
    if entry.language is None:
        collected.unlabelled[file] += 1
        return
    language = languages.check_label(entry.language, file)
    if languages.is_english(language):
        collected.english_labels[language] += 1
        return
    collected.read[language] += 1
    cleaned = Rejection.FUZZY if entry.fuzzy else cleaning.clean(entry.translation, entry.english)
    if not isinstance(cleaned, Rejection):
        source, english = cleaned
        pair = source, texts.setdefault(english, english)
        pairs = collected.pairs[language]
        if pair not in pairs:
            pairs.add(pair)
            return
        cleaned = Rejection.DUPLICATE
    collected.rejected[language][cleaned] += 1


def reject_wrong_script(collected: CollectedPairs):
    """Rejects the pairs whose source has no letter of the language's dominant script."""
    for language, pairs in collected.pairs.items():
        script = cleaning.dominant_script(sorted(source for source, _ in pairs))
        if script:
            wrong = {pair for pair in pairs if not cleaning.is_written_in(pair[0], script)}
            pairs.difference_update(wrong)
            collected.rejected[language].update({Rejection.WRONG_SCRIPT: len(wrong)} if wrong else {})
