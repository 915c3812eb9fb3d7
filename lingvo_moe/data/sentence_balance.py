"""Sampling by English sentence: a multi-way parallel corpus has some sentences in every language, and most in a few.

A pair whose English text stands in k pairs of all languages together gets a weight in proportion to k ** -balance. With
balance 0 all pairs are read equally often, so a model reads the English of a sentence with 40 translations 40 times
and learns it by heart. With balance 1 all English sentences are read equally often. The weights are integers, the
number of times that a pair stands in its language's list; `mixture` samples from that list, whose length is then what
temperature sampling takes for the size of the language.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from lingvo_moe.data.corpus import Pairs

RESOLUTION = 256  # the weight of a pair whose English text no other pair has


class PairList(Protocol):
    """(source, English) pairs by index."""

    def __len__(self) -> int:
        """Returns the number of pairs."""
        ...

    def __getitem__(self, index: int, /) -> tuple[str, str]:
        """Returns a pair; raises IndexError if there is none."""
        ...


class RepeatedPairs:
    """A list of pairs in which each stands several times, without copies."""

    def __init__(self, pairs: PairList, weights: np.ndarray):
        """Takes the pairs and how often each of them stands in the list: `[len(pairs)] int64`, each at least 1."""
        self._pairs = pairs
        self._ends = np.cumsum(weights)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> tuple[str, str]:
        if not 0 <= index < len(self):
            raise IndexError(f"pair {index} of {len(self)}")
        return self._pairs[int(np.searchsorted(self._ends, index, side="right"))]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return (self[index] for index in range(len(self)))


def balance_sentences(languages: Sequence[Pairs], balance: float) -> list[RepeatedPairs]:
    """Returns the list that each language's examples are drawn from.

    Args:
      languages: the training pairs of each language.
      balance: between 0 and 1, see the module.
    """
    texts = [pairs.english() for pairs in languages]
    occurrences = Counter(text for language in texts for text in language)

    def weights(language: Sequence[bytes]) -> np.ndarray:
        counts = np.fromiter((occurrences[text] for text in language), np.float64, len(language))
        return np.maximum(np.rint(RESOLUTION * counts**-balance), 1).astype(np.int64)

    return [RepeatedPairs(pairs, weights(text)) for pairs, text in zip(languages, texts, strict=True)]
