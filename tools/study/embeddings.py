"""The initial embeddings of a study's runs, as `python -m tools.train_embeddings` makes them."""

from __future__ import annotations

from collections.abc import Sequence

from lingvo_moe.data.corpus import Corpus
from lingvo_moe.data.tokenizer import Tokenizers
from lingvo_moe.data.vocabularies import piece_vectors
from tools.study.trial import Data, Trial


def make(trials: Sequence[Trial], data: Data):
    """Counts what is missing, each from the corpus that a run is trained on: a bilingual model's is of its language.

    Args:
      trials: the runs; those whose models have no tied embeddings start with random ones.
      data: what they read; gets the files.

    Raises:
      UserError: a corpus has no training pair.
    """
    tokenizers = Tokenizers.load(data.tokenizers)
    for language, dim in sorted({(each.run.language, each.embedding_dim) for each in trials if each.embedding_dim}):
        file = data.embeddings_of(language, dim)
        file.parent.mkdir(parents=True, exist_ok=True)
        piece_vectors.make(str(file), Corpus.open(data.training[language]), tokenizers, dim)
