"""The command line says what it made, what a small corpus could not give, and which flag is wrong."""

from __future__ import annotations

import pytest

from lingvo_moe.cli import app
from lingvo_moe.data.tokenizer import Tokenizers
from lingvo_moe.testing.corpora import write_corpus
from tools import train_tokenizer


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    pairs = [(f"Haus Nummer {i} steht dort.", f"House number {i} stands there.") for i in range(300)]
    return str(write_corpus(tmp_path_factory.mktemp("corpora") / "corpus", {"de": {"train": pairs}}))


def run(*arguments: str) -> int:
    for name in train_tokenizer.FLAGS:  # a value lives until the process ends, and here that is the test run
        train_tokenizer.FLAGS[name].unparse()
    return app.execute(train_tokenizer.main, ["train_tokenizer", *arguments], train_tokenizer.FLAGS)


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


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((), "--corpus=DIR is missing"),
        (("--corpus=x",), "--output=DIR is missing"),
        (("x",), "unexpected argument 'x'; the corpus is named with --corpus=x"),
        (("--corpus=x", "--output=y"), "the corpus x does not exist"),
        (("--corpus=x", "--output=y", "--source_vocabulary=10"), "source_vocabulary"),
        (("--corpus=x", "--output=y", "--max_sentences=0"), "max_sentences"),
        (("--corpora=x",), "unknown flag --corpora. Did you mean corpus?"),
    ],
)
def test_a_mistake_is_one_line(arguments, message, capsys):
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert message in error
