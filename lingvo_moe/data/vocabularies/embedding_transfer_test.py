"""Embeddings for another tokenizer: pieces keep their rows by their text, new ones have the mean of their parts."""

from __future__ import annotations

import numpy as np
import pytest

from lingvo_moe.data.corpus import Corpus
from lingvo_moe.data.vocabularies import embedding_transfer, tokenizer_trainer
from lingvo_moe.testing.corpora import write_corpus


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """Of two corpora that share some words."""
    directory = tmp_path_factory.mktemp("tokenizers")
    found = []
    for noun in ("Haus", "Häuschen"):
        pairs = [(f"{noun} Nummer {i} steht dort.", f"House number {i} stands there.") for i in range(300)]
        corpus = Corpus.open(write_corpus(directory / noun, {"de": {"train": pairs}}))
        sizes = {"source": 330 if found else 400, "target": 60}
        found.append(tokenizer_trainer.train(corpus, directory / f"of_{noun}", sizes, 1.0, 300)[0].source)
    return found


@pytest.fixture(scope="module")
def table():
    return np.random.default_rng(0).normal(size=(420, 8)).astype(np.float32)


def test_the_same_tokenizer_changes_nothing(tokenizers, table):
    np.testing.assert_array_equal(embedding_transfer.transfer(table, tokenizers[0], tokenizers[0]), table)


def test_pieces_of_both_keep_their_rows_and_others_have_the_mean_of_their_parts(tokenizers, table):
    """Counted here by text, with SentencePiece's own segmentation of what is new."""
    old, new = tokenizers
    moved = embedding_transfer.transfer(table, old, new)
    before, after = (tokenizer.pieces(range(tokenizer.vocabulary_size)) for tokenizer in (old, new))
    assert len(set(before) & set(after)) > 270 and set(after) - set(before)
    for row, piece in enumerate(after):
        if piece in before:
            np.testing.assert_array_equal(moved[row], table[before.index(piece)], err_msg=piece)
            continue
        parts = [table[before.index(part)] for part in old.pieces(old.encode([piece.strip("▁")])[0]) if part != "▁"]
        np.testing.assert_allclose(moved[row], np.mean(parts, axis=0), rtol=1e-6, err_msg=piece)
    np.testing.assert_array_equal(moved[len(after) :], table[len(after) :])
