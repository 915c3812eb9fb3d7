"""Protects the tokenizer trainer's command line: its summary, its note on small corpora, and one-line errors."""

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
    for name in train_tokenizer.FLAGS:  # flags keep their values until the process ends
        train_tokenizer.FLAGS[name].unparse()
    return app.execute(train_tokenizer.main, ["train_tokenizer", *arguments], train_tokenizer.FLAGS)


@pytest.mark.slow
def test_second_call_reports_up_to_date(corpus, tmp_path, capsys):
    """A smaller vocabulary than requested is noted; the second call trains nothing."""
    output = tmp_path / "tokenizer"
    flags = (f"--corpus={corpus}", f"--output={output}", "--source_vocabulary=400", "--target_vocabulary=2000")
    assert run(*flags) == 0
    size = Tokenizers.load(output).target.vocabulary_size
    captured = capsys.readouterr()
    assert f"the target tokenizer has {size} pieces, not 2000: the corpus has no more" in captured.err
    advised = int(captured.err.partition("--set model.target_vocabulary=")[2].partition(",")[0])
    assert advised % 8 == 0 and size <= advised < size + 8
    assert f"{output} trained: " in captured.out
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
        (("--corpus=x", "--output=y", "--target_vocabulary=99999999999999999999"), "target_vocabulary"),
        (("--corpus=x", "--output=y", "--shared_vocabulary=2147483648"), "shared_vocabulary"),
        (("--corpus=x", "--output=y", "--max_sentences=0"), "max_sentences"),
        (
            ("--corpus=x", "--output=y", "--shared_vocabulary=500", "--align_pieces"),
            "--align_pieces aligns two tokenizers; --shared_vocabulary trains one",
        ),
        (("--corpora=x",), "unknown flag --corpora. Did you mean corpus?"),
    ],
)
def test_mistake_is_a_one_line_error(arguments, message, capsys):
    """It names the flag, with exit status 2."""
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert message in error
