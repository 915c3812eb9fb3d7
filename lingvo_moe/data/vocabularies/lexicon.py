"""Which pieces translate which: IBM Model 1, learnt from sentence pairs without an alignment.

Brown et al. 1993, section 4: each piece of a translation comes from one piece of its source, any of them alike, or from
the NULL word. Each iteration of expectation-maximisation counts the whole sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from lingvo_moe.data.tokenizer import SPECIAL_IDS
from lingvo_moe.utils import progress

ITERATIONS = 4
_NULL_WORD = SPECIAL_IDS["unk"]  # the unknown piece, which no source text has, stands for it
_TINY = 1e-30  # nothing, but not a divisor of zero
_CHUNK = 20_000  # sentence pairs counted at a time: about 4 million pairs of pieces
# An iteration counts all pairs of pieces of a sentence pair; long ones have most, and inform least.
_MOST_SOURCE_PIECES, _MOST_TARGET_PIECES = 60, 40

SentencePairs = Sequence[tuple[np.ndarray, np.ndarray]]


def translation_probabilities(pairs: SentencePairs, num_sources: int, num_targets: int) -> np.ndarray:
    """Returns p(target piece | source piece): `[num_sources, num_targets] float32`.

    Rows sum to 1, or to 0 for pieces that no source has. It takes 8 bytes for each entry while it runs.

    Args:
      pairs: ids of source and target, each `[length] int32`; empty and very long ones are left out.
      num_sources: the number of source pieces.
      num_targets: the number of target pieces.
    """
    kept = [
        pair for pair in pairs if 0 < len(pair[0]) <= _MOST_SOURCE_PIECES and 0 < len(pair[1]) <= _MOST_TARGET_PIECES
    ]
    table = np.ones(num_sources * num_targets, np.float32)
    for _ in progress.track(range(ITERATIONS), "aligning pieces (IBM Model 1)", unit="iterations"):
        counts = np.zeros_like(table)
        for cells, lengths in _cells(kept, num_targets):
            probabilities = table[cells]
            totals = np.add.reduceat(probabilities, np.cumsum(lengths) - lengths)
            np.add.at(counts, cells, probabilities / np.repeat(np.maximum(totals, _TINY), lengths))
        rows = counts.reshape(num_sources, num_targets)
        rows /= np.maximum(rows.sum(axis=1, keepdims=True), _TINY)
        table = counts
    return table.reshape(num_sources, num_targets) if kept else np.zeros((num_sources, num_targets), np.float32)


def _cells(pairs: SentencePairs, num_targets: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the pieces that each target piece may come from, chunk by chunk.

    Yields:
      (cells, lengths): `lengths [target pieces]` counts the candidates of each, among them `_NULL_WORD`; `cells
      [candidates] int64` are their entries in the table of probabilities, source * num_targets + target.
    """
    for first in range(0, len(pairs), _CHUNK):
        chunk = pairs[first : first + _CHUNK]
        sources = np.concatenate([np.append(source, _NULL_WORD) for source, _ in chunk]).astype(np.int64)
        targets = np.concatenate([target for _, target in chunk])
        source_lengths = np.array([len(source) + 1 for source, _ in chunk])
        target_lengths = [len(target) for _, target in chunk]
        lengths = np.repeat(source_lengths, target_lengths)
        # Candidate i of a target piece is piece i of its source, whose pieces start at `starts`.
        starts = np.repeat(np.cumsum(source_lengths) - source_lengths, target_lengths)
        shifts = np.repeat(np.cumsum(lengths) - lengths - starts, lengths)
        yield sources[np.arange(len(shifts)) - shifts] * num_targets + np.repeat(targets, lengths), lengths
