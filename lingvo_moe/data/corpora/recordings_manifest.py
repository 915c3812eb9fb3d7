"""What the manifest of a speech corpus says beside its voices."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from lingvo_moe.data.corpora.corpus_writer import OutputDirectory


def facts(target: OutputDirectory, sample_rate: int, transcripts: Mapping[str, Set[str]]) -> dict[str, Any]:
    """Returns the facts that every speech corpus has; those of its sources are to be added.

    Args:
      target: the directory of the corpus.
      sample_rate: of all recordings, in samples per second.
      transcripts: the different ones of each split.
    """
    total = len(set().union(*transcripts.values()))
    keys = {"all": total, "eligible": total, "near_duplicates": 0, "overlapping": 0}
    return {
        "inputs_identity": target.identity,
        "unseen_by": None,
        "audio": {"sample_rate": sample_rate},
        "missing_packages": [],
        "english_keys": keys | {split: len(transcripts[split]) for split in ("test", "valid")},
        "english_labels": {},
        "unlabelled": {},
        "skipped_links": {},
    }
