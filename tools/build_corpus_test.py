"""The command line builds a corpus from Django's translations, says so, and puts a wrong call into one line."""

from __future__ import annotations

import pytest

from lingvo_moe.cli import app
from lingvo_moe.data.corpus import SPLITS, Corpus
from lingvo_moe.data.splitting import english_key
from tools import build_corpus


def _run(*arguments: str) -> int:
    return app.execute(build_corpus.main, ["build_corpus", *arguments], build_corpus.FLAGS)


@pytest.fixture(scope="module")
def django(tmp_path_factory) -> Corpus:
    output = tmp_path_factory.mktemp("django") / "corpus"
    assert _run("--preset=django", f"--output={output}") == 0
    return Corpus.open(output)


def test_quickstart_has_many_languages_and_no_leak(django):
    assert len(django.languages) > 90 and "en_GB" not in django.languages
    assert django.count("train") > 50_000
    keys = {
        split: {
            english_key(english)
            for language in django.languages_of(split)
            for _, english in django.pairs(split, language)
        }
        for split in SPLITS
    }
    assert keys["test"] and keys["valid"]
    assert not keys["train"] & (keys["test"] | keys["valid"]) and not keys["test"] & keys["valid"]


def test_a_second_call_finds_it_up_to_date(django, capsys):
    assert _run("--preset=django", f"--output={django.directory}") == 0
    assert f"{django.directory} is up to date: {len(django.languages)} languages" in capsys.readouterr().out


def test_own_inputs_may_be_several(tmp_path):
    for language in ("de", "fr"):
        (tmp_path / f"{language}.tsv").write_text(f"{language} text\ttext\n")
    inputs = [f"--input={tmp_path}/{language}.tsv" for language in ("de", "fr")]
    assert _run("--preset=none", *inputs, f"--output={tmp_path}/corpus") == 0
    assert Corpus.open(tmp_path / "corpus").languages == ("de", "fr")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--preset=none"], "where to? Name the directory to make with --output=DIR."),
        (["--preset=none", "--output=x"], "name your files with --input=DIR_OR_FILE"),
        (["--output=x", "texts"], "unexpected argument 'texts'; inputs are named with --input=texts."),
        (["--outptu=x"], "unknown flag --outptu. Did you mean output?"),
        (
            ["--preset=debain", "--output=x"],
            "flag --preset=debain: value should be one of <quickstart|django|debian|none>",
        ),
    ],
)
def test_a_wrong_call(capsys, arguments, message):
    assert _run(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
