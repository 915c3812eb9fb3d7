"""Protects the data of a study: training pairs are limited, held-out pairs are those of the whole corpus."""

from __future__ import annotations

import pytest

from lingvo_moe.data.corpus import Corpus
from lingvo_moe.errors import UserError
from lingvo_moe.testing.corpora import write_corpus
from tools.study import corpora


@pytest.fixture
def corpus(tmp_path) -> Corpus:
    def pairs(language: str, split: str, count: int) -> list[tuple[str, str]]:
        return [(f"{language} {split} {i:02}", f"english {split} {i:02}") for i in range(count)]

    counts = {"train": 12, "valid": 3, "test": 4}
    made = {language: {split: pairs(language, split, n) for split, n in counts.items()} for language in ("de", "fr")}
    return Corpus.open(write_corpus(tmp_path / "whole", {**made, "it": {"train": pairs("it", "train", 2)}}))


def test_training_pairs_are_limited_and_held_out_pairs_are_not(corpus, tmp_path):
    """Evenly spaced, since files are sorted; 0 takes all. The report counts what was left out."""
    found = corpora.restrict(corpus, {"fr": 4, "de": 0}, tmp_path / "part")
    assert found.languages == ("de", "fr") and found.count("train", "de") == 12
    assert [source for source, _ in found.pairs("train", "fr")] == [f"fr train {i:02}" for i in (0, 3, 6, 9)]
    for split in ("valid", "test"):
        for language in found.languages:
            assert list(found.pairs(split, language)) == list(corpus.pairs(split, language))
    assert "8  left out by the study" in (tmp_path / "part" / "report.txt").read_text(encoding="utf-8")


def test_a_corpus_that_is_there_is_not_written_again(corpus, tmp_path):
    """And one of other limits is not replaced: runs may have been trained on it."""
    corpora.restrict(corpus, {"fr": 4}, tmp_path / "part")
    written = (tmp_path / "part" / "corpus.json").stat().st_mtime_ns
    assert corpora.restrict(corpus, {"fr": 4}, tmp_path / "part").count("train") == 4
    assert (tmp_path / "part" / "corpus.json").stat().st_mtime_ns == written
    with pytest.raises(UserError, match="has the pairs of another corpus.*--directory"):
        corpora.restrict(corpus, {"fr": 5}, tmp_path / "part")


def test_a_language_must_have_pairs_of_all_splits(corpus, tmp_path):
    """A model could not be tested on it."""
    with pytest.raises(UserError, match="it has no valid pairs; these have: de, fr"):
        corpora.restrict(corpus, {"it": 0}, tmp_path / "part")
    assert not (tmp_path / "part").exists()
