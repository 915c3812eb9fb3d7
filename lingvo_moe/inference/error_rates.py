"""Character and word error rates (CER and WER) of transcripts, and the majority baseline."""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class ErrorRates:
    """CER and WER in %: edit distance divided by the length of the references."""

    characters: float
    words: float

    @classmethod
    def of(cls, transcripts: Sequence[str], references: Sequence[str]) -> ErrorRates:
        """Returns the rates of all transcripts together; raises ValueError for references without a word."""
        pairs = list(zip(transcripts, references, strict=True))
        if not any(reference.split() for reference in references):
            raise ValueError("error rates: the references have no word.")
        return cls(
            _rate([(list(transcript), list(reference)) for transcript, reference in pairs]),
            _rate([(transcript.split(), reference.split()) for transcript, reference in pairs]),
        )


def majority_transcript(training: Sequence[str]) -> str:
    """Returns the most frequent word of training transcripts, as often as the median of them has words.

    It is the majority baseline: it ignores the audio.
    """
    counts = collections.Counter(word for transcript in training for word in transcript.split())
    if not counts:
        return ""
    word = min(counts, key=lambda word: (-counts[word], word))
    return " ".join([word] * statistics.median_low(len(transcript.split()) for transcript in training))


def edit_distance(one: Sequence[str], other: Sequence[str]) -> int:
    """Returns the fewest insertions, deletions and substitutions that make `other` of `one` (Levenshtein)."""
    positions = np.arange(len(other) + 1)
    previous = positions
    for count, item in enumerate(one, start=1):
        substituted = previous[:-1] + np.array([item != each for each in other], int)
        best = np.concatenate([[count], np.minimum(substituted, previous[1:] + 1)])
        # Insertions run along the row: the least of best[k] + (j - k) over k <= j.
        previous = np.minimum.accumulate(best - positions) + positions
    return int(previous[-1])


def _rate(pairs: Sequence[tuple[list[str], list[str]]]) -> float:
    edits = sum(edit_distance(transcript, reference) for transcript, reference in pairs)
    return 100.0 * edits / sum(len(reference) for _, reference in pairs)
