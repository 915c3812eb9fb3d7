"""Protects the fairness of a study: each run starts with embeddings counted from its own corpus."""

from __future__ import annotations

import os

import numpy as np
import pytest

from lingvo_moe.data.corpus import Corpus
from lingvo_moe.data.tokenizer import Tokenizers
from lingvo_moe.data.vocabularies import piece_vectors, tokenizer_trainer
from tools.study import corpora, embeddings
from tools.study.plan import Run, Study
from tools.study.trial import Data, Trial

_SMALL = ("model.model_dim=16", "model.num_heads=2", "model.head_dim=8", "model.num_experts=0")
_UNTIED = ("model.tied_embeddings=false", "model.model_dim=32")


@pytest.mark.slow
def test_embeddings_are_counted_from_the_corpus_of_a_run_alone(data, tmp_path):
    """Once for all seeds, and none for a model that could not take them."""
    study = Study("m4.Quickstart", {"de": 0, "fr": 0}, _SMALL, 300, 3, (), (), ())
    runs = [Run("dense"), Run("dense", seed=1), Run("bilingual fr", "fr"), Run("untied", "", _UNTIED)]
    trials = [Trial(study, run, tmp_path / run.name) for run in runs]
    corpus = Corpus.open(data.corpus)
    french = corpora.restrict(corpus, {"fr": 0}, tmp_path / "fr")
    tokenizer_trainer.train(corpus, tmp_path / "tokenizers", {tokenizer_trainer.SHARED: 300}, 5.0, 5000)
    training = {"": corpus.directory, "fr": french.directory}
    made = Data(corpus.directory, training, tmp_path / "tokenizers", tmp_path / "x.txt", tmp_path / "embeddings")
    embeddings.make(trials, made)

    files = {path: os.stat(path).st_mtime_ns for path in (tmp_path / "embeddings").rglob("*") if path.is_file()}
    assert set(files) == {made.embeddings_of("", 16), made.embeddings_of("fr", 16)}
    tokenizers = Tokenizers.load(tmp_path / "tokenizers")
    of_all, of_french = (piece_vectors.read(str(made.embeddings_of(each, 16)), tokenizers, "-") for each in ("", "fr"))
    assert of_all.source.shape == of_french.source.shape == (tokenizers.source.vocabulary_size, 16)
    assert np.isfinite(of_french.source).all() and not np.allclose(of_all.source, of_french.source)
    for read, counted in zip(of_french, piece_vectors.train(french, tokenizers, 16, 5.0, 150_000), strict=True):
        np.testing.assert_array_equal(read, counted)

    embeddings.make(trials, made)
    assert {path: os.stat(path).st_mtime_ns for path in files} == files
