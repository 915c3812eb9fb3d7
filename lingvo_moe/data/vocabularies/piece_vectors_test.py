"""Protects the initial embeddings: translations and pieces of like neighbours are close, and files are checked."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from safetensors.numpy import save_file

from lingvo_moe.data.corpus import Corpus
from lingvo_moe.data.tokenizer import Tokenizer, Tokenizers
from lingvo_moe.data.vocabularies import piece_vectors, tokenizer_trainer
from lingvo_moe.errors import UserError
from lingvo_moe.testing.corpora import write_corpus

_NOUNS, _VERBS = np.arange(10, 30), np.arange(30, 50)
_SIZE = 150
_GERMAN, _ENGLISH = ("Haus", "Baum", "Fluss", "Stein"), ("house", "tree", "river", "stone")


def _pairs(count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Noun, verb, noun, in English; piece i of it is piece i + 50 of the one and i + 100 of the other language."""
    generator = np.random.default_rng(0)
    sentences = [
        np.array([generator.choice(_NOUNS), generator.choice(_VERBS), generator.choice(_NOUNS)], np.int32)
        for _ in range(count)
    ]
    return [(sentence + 50 * generator.integers(1, 3), sentence) for sentence in sentences]


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    return piece_vectors.shared_vectors(_pairs(1500), _SIZE, 32)


def test_the_nearest_pieces_are_the_translations(vectors):
    english = np.arange(10, 50)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
    for shift in (50, 100):
        products = vectors[english + shift] @ vectors[english].T
        assert (products.argmax(axis=1) == np.arange(40)).all()
        assert products.diagonal().min() > 0.8
    # No two pieces are the same, or training could not tell them apart.
    assert (vectors[english + 50] * vectors[english + 100]).sum(axis=1).max() < 0.99


def test_pieces_of_separate_tokenizers_have_vectors_of_their_own(vectors):
    """The ids of the sides are unrelated; translations are as close as those of one tokenizer."""
    pairs = [(source - 50, target) for source, target in _pairs(1500)]
    source, target = piece_vectors.separate_vectors(pairs, 100, 60, 32)
    assert source.shape == (100, 32) and target.shape == (60, 32) and source.dtype == target.dtype == np.float32
    english = np.arange(10, 50)
    for shift in (0, 50):
        products = source[english + shift] @ target[english].T
        assert (products.argmax(axis=1) == np.arange(40)).all()
        assert products.diagonal().min() > 0.8
    # Pieces that are nowhere have nothing in common.
    assert np.abs((source[50:60] * target[50:60]).sum(axis=1)).max() < 0.8


def test_pieces_with_the_same_neighbours_are_close(vectors):
    """Nouns beside nouns, verbs beside verbs: by `context_vectors`, which do not see the other side."""
    contexts = piece_vectors.context_vectors([target for _, target in _pairs(1500)], _SIZE, 16)
    nouns, verbs = contexts[_NOUNS], contexts[_VERBS]
    assert (nouns @ nouns.T).mean() > (nouns @ verbs.T).mean() + 0.3
    assert not contexts[50:].any()  # never in English
    assert (vectors[_NOUNS] @ vectors[_NOUNS].T).mean() > (vectors[_NOUNS] @ vectors[_VERBS].T).mean() + 0.2


def test_repeated_sentences_count_once():
    """More copies of a string, from other packages, change nothing."""
    sentences = [target for _, target in _pairs(300)]
    expected = piece_vectors.context_vectors(sentences, _SIZE, 16)
    np.testing.assert_array_equal(piece_vectors.context_vectors([*sentences, *sentences[:50] * 9], _SIZE, 16), expected)


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> tuple[Corpus, Tokenizers]:
    directory = tmp_path_factory.mktemp("shared")
    pairs = [
        (
            f"Mein {_GERMAN[i % 4]} und dein {_GERMAN[j % 4]} {i * j}",
            f"My {_ENGLISH[i % 4]} and your {_ENGLISH[j % 4]} {i * j}",
        )
        for i in range(24)
        for j in range(24)
    ]
    corpus = Corpus.open(write_corpus(directory / "corpus", {"de": {"train": pairs}}))
    tokenizers, _ = tokenizer_trainer.train(corpus, directory / "tokenizers", {"shared": 400}, 5.0, 600)
    return corpus, tokenizers


def test_a_corpus_gives_the_same_vectors_again(shared):
    corpus, tokenizers = shared
    vectors = piece_vectors.train(corpus, tokenizers, 32, temperature=5.0, max_sentences=600)
    assert vectors.source.shape == (tokenizers.source.vocabulary_size, 32) and vectors.source is vectors.target
    np.testing.assert_array_equal(piece_vectors.train(corpus, tokenizers, 32, 5.0, 600), vectors)


def test_a_file_is_read_for_its_own_tokenizer_alone(shared, tmp_path):
    """Rows of another tokenizer would be the vectors of other pieces."""
    _, tokenizers = shared
    table = np.ones((tokenizers.source.vocabulary_size, 8), np.float32)
    vectors = piece_vectors.Vectors(table, table)
    file = str(tmp_path / "vectors.safetensors")
    piece_vectors.write(file, vectors, tokenizers, {})
    np.testing.assert_array_equal(piece_vectors.read(file, tokenizers, "--flag"), vectors)
    assert [path.name for path in tmp_path.iterdir()] == ["vectors.safetensors"]
    other = Tokenizer(tokenizers.source.model + b" ")
    with pytest.raises(UserError, match="--flag=.* was made with another tokenizer; make it again with --tokenizers"):
        piece_vectors.read(file, dataclasses.replace(tokenizers, source=other, target=other), "--flag")
    with pytest.raises(UserError, match="was made with another tokenizer"):
        piece_vectors.read(file, dataclasses.replace(tokenizers, source=other), "--flag")
    with pytest.raises(UserError, match="no such file; `python -m tools.train_embeddings` makes one"):
        piece_vectors.read(f"{file}.absent", tokenizers, "--flag")


def test_a_file_has_the_vectors_of_both_tokenizers(shared, tmp_path):
    """A corpus gives vectors of two tokenizers too, and the file tells the sides apart."""
    corpus, _ = shared
    tokenizers, _ = tokenizer_trainer.train(corpus, tmp_path / "two", {"source": 400, "target": 60}, 5.0, 600)
    file = str(tmp_path / "vectors.safetensors")
    assert piece_vectors.make(file, corpus, tokenizers, 32, max_sentences=600)
    assert not piece_vectors.make(file, corpus, tokenizers, 32, max_sentences=600)
    expected = piece_vectors.train(corpus, tokenizers, 32, 5.0, 600)
    found = piece_vectors.read(file, tokenizers, "--flag")
    assert found.source.shape == (tokenizers.source.vocabulary_size, 32)
    assert found.target.shape == (tokenizers.target.vocabulary_size, 32)
    for side in found._fields:
        np.testing.assert_array_equal(getattr(found, side), getattr(expected, side))
    swapped = dataclasses.replace(tokenizers, source=tokenizers.target, target=tokenizers.source)
    with pytest.raises(UserError, match="was made with another tokenizer"):
        piece_vectors.read(file, swapped, "--flag")


@pytest.mark.parametrize(
    "content", [b"", b"not safetensors", None, {"format": "x"}, {"lingvo_moe.piece_vectors": "[1]"}], ids=str
)
def test_another_file_is_one_line(content, shared, tmp_path):
    file = tmp_path / "other.safetensors"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        save_file({"a": np.zeros(2, np.float32)}, file, content)
    with pytest.raises(UserError, match="is not a file of tools.train_embeddings"):
        piece_vectors.read(str(file), shared[1], "--flag")


def test_surplus_rows_of_a_model_are_random_unit_vectors():
    vectors = np.eye(4, dtype=np.float32)
    extended = piece_vectors.extend(vectors, 6)
    np.testing.assert_array_equal(extended[:4], vectors)
    np.testing.assert_allclose(np.linalg.norm(extended, axis=1), 1, rtol=1e-6)
    assert extended.dtype == np.float32 and abs(extended[4] @ extended[5]) < 0.99


def test_a_file_that_cannot_be_written_is_one_line(shared, tmp_path):
    """After the work, as a full disk is; `tensor_files_test` has that."""
    file = tmp_path / "gone" / "vectors.safetensors"
    with pytest.raises(UserError, match="gone/vectors.safetensors: cannot be written .* free disk space"):
        piece_vectors.make(str(file), *shared, 8, max_sentences=60)
