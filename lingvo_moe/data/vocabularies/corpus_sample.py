"""A sample of a corpus with the mixture of languages that training has, for what is learnt before training."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lingvo_moe.data.corpus import Corpus
from lingvo_moe.data.mixture import Mixture
from lingvo_moe.utils import progress


def sample_pairs(corpus: Corpus, temperature: float, count: int) -> Iterator[tuple[str, str, int]]:
    """Yields (source, English, how often): the different pairs among the first `count` of the training stream, seed 0.

    Args:
      corpus: its training split is read.
      temperature: of the sampling of languages, see `mixture`.
      count: the number of pairs to sample, including repetitions.

    Raises:
      UserError: the corpus has no training pair.
    """
    mixture = Mixture(tuple(corpus.count("train", language) for language in corpus.languages), temperature)
    pairs, repetitions = np.unique(np.stack(mixture.sample(np.arange(count))), axis=1, return_counts=True)
    sampled = list(zip(*pairs.tolist(), repetitions.tolist(), strict=True))
    for language, index, times in progress.track(sampled, "reading the corpus", unit="pairs"):
        yield *corpus.pairs("train", corpus.languages[language])[index], times
