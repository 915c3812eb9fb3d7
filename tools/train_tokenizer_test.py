"""The command line says what it made, what a small corpus could not give, and which flag is wrong."""

from __future__ import annotations

from collections import Counter

import pytest

from lingvo_moe import cli
from lingvo_moe.data.corpus_writer import Writer
from lingvo_moe.data.tokenizer import Tokenizers
from tools import train_tokenizer


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    directory = tmp_path_factory.mktemp("corpus")
    writer = Writer(directory)
    pairs = [(f"Haus Nummer {i} steht dort.", f"House number {i} stands there.") for i in range(300)]
    writer.add("de", {"train": pairs, "valid": [], "test": []}, len(pairs), Counter())
    writer.finish({"preset": "none", "inputs": [], "english_keys": {}, "english_labels": {}, "unlabelled": {}})
    return str(directory)


def run(*arguments: str) -> int:
    return cli.execute(train_tokenizer.main, ["train_tokenizer", *arguments], train_tokenizer.FLAGS)


def test_trains_and_then_leaves_it_as_it_is(corpus, tmp_path, capsys):
    output = tmp_path / "tokenizer"
    flags = (f"--corpus={corpus}", f"--output={output}", "--source_vocabulary=400", "--target_vocabulary=2000")
    assert run(*flags) == 0
    size = Tokenizers.load(output).target.vocabulary_size
    said = capsys.readouterr().out
    assert f"note: target.model has {size} pieces, not 2000" in said
    assert f"{output} trained: " in said
    assert run(*flags) == 0
    assert f"{output} is up to date" in capsys.readouterr().out


@pytest.mark.parametrize("arguments, message", [
    ((), "--corpus=DIR is missing"),
    (("--corpus=x",), "--output=DIR is missing"),
    (("x",), "unexpected argument 'x'; the corpus is named with --corpus=x"),
    (("--corpus=x", "--output=y"), "the corpus x does not exist"),
    (("--corpus=x", "--output=y", "--source_vocabulary=10"), "source_vocabulary"),
    (("--corpus=x", "--output=y", "--max_sentences=0"), "max_sentences"),
    (("--corpora=x",), "unknown flag --corpora. Did you mean corpus?"),
])
def test_a_mistake_is_one_line(arguments, message, capsys):
    train_tokenizer.FLAGS.unparse_flags()
    for name in ("corpus", "output", "source_vocabulary", "max_sentences"):
        train_tokenizer.FLAGS[name].unparse()
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert message in error
