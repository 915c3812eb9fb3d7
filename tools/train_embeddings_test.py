"""Protects the command line of the initial embeddings: its summary, its file, and one-line errors."""

from __future__ import annotations

import pytest

from lingvo_moe.cli import app
from lingvo_moe.data.corpus import Corpus
from lingvo_moe.data.tokenizer import Tokenizers
from lingvo_moe.data.vocabularies import piece_vectors, tokenizer_trainer
from lingvo_moe.testing.corpora import write_corpus
from tools import train_embeddings


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    pairs = [(f"Haus Nummer {i} steht dort.", f"House number {i} stands there.") for i in range(300)]
    corpus = Corpus.open(write_corpus(directory / "corpus", {"de": {"train": pairs}}))
    tokenizer_trainer.train(corpus, directory / "shared", {"shared": 400}, 5.0, 300)
    tokenizer_trainer.train(corpus, directory / "two", {"source": 400, "target": 60}, 5.0, 300)
    return directory


def _run(*arguments: str) -> int:
    for name in train_embeddings.FLAGS:  # flags keep their values until the process ends
        train_embeddings.FLAGS[name].unparse()
    return app.execute(train_embeddings.main, ["train_embeddings", *arguments], train_embeddings.FLAGS)


def test_a_file_of_vectors_is_written_once(directory, capsys):
    """Other flags replace it, the same ones leave it."""
    output = directory / "vectors.safetensors"
    flags = (f"--corpus={directory / 'corpus'}", f"--tokenizers={directory / 'shared'}", f"--output={output}")
    assert _run(*flags, "--model_dim=8") == 0
    assert _run(*flags, "--model_dim=16", "--max_sentences=300") == 0
    tokenizers = Tokenizers.load(directory / "shared")
    size = tokenizers.source.vocabulary_size
    assert f"{output} made: {size} pieces, vectors of 16." in capsys.readouterr().out
    assert piece_vectors.read(str(output), tokenizers, "--output").source.shape == (size, 16)
    before = output.stat().st_mtime_ns
    assert _run(*flags, "--model_dim=16", "--max_sentences=300") == 0
    assert "is up to date" in capsys.readouterr().out and output.stat().st_mtime_ns == before


def test_two_tokenizers_have_vectors_of_each_side(directory, capsys):
    output = directory / "two.safetensors"
    assert _run(f"--corpus={directory / 'corpus'}", f"--tokenizers={directory / 'two'}", f"--output={output}") == 0
    sizes = [Tokenizers.load(directory / "two").by_side[side].vocabulary_size for side in ("source", "target")]
    expected = f"{output} made: {sizes[0]} source and {sizes[1]} target pieces, vectors of 256."
    assert expected in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((), "--corpus is missing"),
        (("--corpus={}/corpus", "--tokenizers={}/shared"), "--output is missing"),
        (("--corpus={}/corpus", "--tokenizers={}/shared", "--output={}/x.npz"), "expected a name that ends with .safe"),
        (("--corpus={}/no", "--tokenizers={}/shared", "--output={}/x.safetensors"), "no"),
    ],
)
def test_mistakes_are_one_line(arguments, message, directory, capsys):
    assert _run(*(argument.format(directory) for argument in arguments)) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and message in error
    assert not (directory / "x.safetensors").exists()
