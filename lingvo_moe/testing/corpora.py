"""Writes a corpus of given pairs for tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from lingvo_moe.data.corpora.corpus_writer import Pair, Writer
from lingvo_moe.data.corpus import SPLITS


def write_corpus(directory: Path, pairs: Mapping[str, Mapping[str, list[Pair]]]) -> Path:
    """Writes a corpus of `pairs[language][split]` into `directory`, which must not exist; returns `directory`."""
    directory.mkdir(parents=True)
    writer = Writer(directory)
    for language, by_split in sorted(pairs.items()):
        count = sum(map(len, by_split.values()))
        writer.add(language, {split: by_split.get(split, []) for split in SPLITS}, count, Counter())
    writer.finish(
        {
            "preset": "none",
            "inputs": [],
            "missing_packages": [],
            "english_keys": dict.fromkeys(("all", "eligible", "test", "valid", "near_duplicates", "overlapping"), 0),
            "english_labels": {},
            "unlabelled": {},
            "skipped_links": {},
        }
    )
    return directory
