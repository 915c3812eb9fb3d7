"""Protects the corpus builder's command line: a corpus from Django's catalogs, imported sources, one-line errors."""

from __future__ import annotations

import json

import pytest

from lingvo_moe.cli import app
from lingvo_moe.data.corpora import sources
from lingvo_moe.data.corpora.splitting import english_key
from lingvo_moe.data.corpus import SPLITS, Corpus
from tools import build_corpus

_OWN_SOURCE = """
from lingvo_moe.data.corpora.catalogs import Entry
from lingvo_moe.data.corpora.sources import EntrySource, SourceList, register_source

@register_source("proverbs")
def proverbs(cache, selected):
    return SourceList([EntrySource("proverbs", [Entry("de", "Practice makes perfect.", "Übung macht den Meister.")])])
"""


def _run(*arguments: str) -> int:
    return app.execute(build_corpus.main, ["build_corpus", *arguments], build_corpus.FLAGS)


@pytest.fixture(scope="module")
def django(tmp_path_factory) -> Corpus:
    output = tmp_path_factory.mktemp("django") / "corpus"
    assert _run("--preset=django", f"--output={output}") == 0
    return Corpus.open(output)


@pytest.mark.slow
def test_django_corpus_has_many_languages_and_no_shared_keys(django):
    """No English key of a held-out split is in the training split of any language."""
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


@pytest.mark.slow
def test_second_call_reports_up_to_date(django, capsys):
    """A complete corpus of the same inputs is not built again."""
    assert _run("--preset=django", f"--output={django.directory}") == 0
    assert f"{django.directory} is up to date: {len(django.languages)} languages" in capsys.readouterr().out


def test_own_catalogs_without_a_language_are_a_warning(tmp_path, capsys):
    """Before, only report.txt said that their entries are missing."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "de.tsv").write_text("Haus am See\thouse on the lake\n")
    (tmp_path / "own" / "messages.po").write_text('msgid "yes"\nmsgstr "ja"\n\nmsgid "no"\nmsgstr "nein"\n')
    assert _run("--preset=none", f"--input={tmp_path}/own", f"--output={tmp_path}/corpus") == 0
    expected = "2 entries of catalogs whose language is not known were not read: own/messages.po 2. Name the file or"
    assert f"warning: {expected}" in capsys.readouterr().err


def test_several_inputs(tmp_path, capsys):
    """--input may be repeated; a corpus too small for held-out splits is a warning; what was rejected is said."""
    for language in ("de", "fr"):
        (tmp_path / f"{language}.tsv").write_text(f"{language} text\ttext\ntext\ttext\n12\t12\n" * 2)
    inputs = [f"--input={tmp_path}/{language}.tsv" for language in ("de", "fr")]
    assert _run("--preset=none", *inputs, f"--output={tmp_path}/corpus") == 0
    assert Corpus.open(tmp_path / "corpus").languages == ("de", "fr")
    captured = capsys.readouterr()
    assert "warning: the test split has 0 English sentences" in captured.err and "2 train" in captured.out
    reasons = "identical to the English 4, no letters 4, duplicate 2"
    assert f"12 entries read, 10 of them rejected ({reasons})" in captured.out


def test_one_language_and_one_entry_are_singular(tmp_path, capsys):
    """In the line of output and in the report."""
    (tmp_path / "de.tsv").write_text("de text\ttext\n")
    assert _run("--preset=none", f"--input={tmp_path}/de.tsv", f"--output={tmp_path}/corpus") == 0
    assert "built: 1 language, 1 train, 0 valid, 0 test pairs; 1 entry read, 0 of them" in capsys.readouterr().out
    report = (tmp_path / "corpus" / "report.txt").read_text(encoding="utf-8")
    assert report.startswith("Corpus of 1 language into English, preset none\nfrom 1 input: de.tsv\n")


def test_files_that_are_not_read_are_a_warning(tmp_path, capsys):
    """On the terminal and in the report, of all inputs; a corpus that is up to date may be older than such a file."""
    for name in ("own", "test"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "de.tsv").write_text(f"de {name}\t{name} text\n")
    (tmp_path / "test" / "strings.xml").write_text("x")
    inputs = [f"--input={tmp_path}/own", f"--test_input={tmp_path}/test", f"--output={tmp_path}/corpus"]
    assert _run("--preset=none", *inputs) == 0
    expected = "a file of another format was not read: test/strings.xml. Convert it to .po or .tsv"
    assert f"warning: {expected}" in capsys.readouterr().err
    assert f"WARNING: {expected}" in (tmp_path / "corpus" / "report.txt").read_text(encoding="utf-8")
    (tmp_path / "own" / "fr.xliff").write_text("x")
    assert _run("--preset=none", *inputs) == 0
    captured = capsys.readouterr()
    assert "is up to date" in captured.out and ".xliff 1, .xml 1, such as own/fr.xliff" in captured.err


@pytest.mark.parametrize(
    "field", ["english_keys", "languages_without_pairs", "missing_packages", "rejected", "test", "valid"]
)
def test_a_corpus_with_a_damaged_manifest_is_an_error_with_the_remedy(tmp_path, capsys, field):
    """The same command again reads the manifest for its summary; --force builds the corpus again."""
    (tmp_path / "de.tsv").write_text("de text\ttext\n")
    flags = ["--preset=none", f"--input={tmp_path}/de.tsv", f"--output={tmp_path}/corpus"]
    assert _run(*flags) == 0
    path = tmp_path / "corpus" / "corpus.json"
    complete = path.read_bytes()
    manifest = json.loads(complete)
    (manifest if field in manifest else manifest["languages"]["de"]).pop(field)
    path.write_text(json.dumps(manifest))
    capsys.readouterr()
    assert _run(*flags) == 2
    error = capsys.readouterr().err
    assert "or a corrupt one" in error and "replace it with --force" in error and error.count("\n") == 1
    assert _run(*flags, "--force") == 0
    assert path.read_bytes() == complete


def test_source_of_an_imported_file_is_a_preset(tmp_path):
    """A data source outside of the tree is one file, passed with --import."""
    (tmp_path / "proverbs_source.py").write_text(_OWN_SOURCE, encoding="utf-8")
    flags = (f"--import={tmp_path}/proverbs_source.py", "--preset=proverbs", f"--output={tmp_path}/corpus")
    with sources.PRESETS.isolated():
        assert _run(*flags) == 0
    corpus = Corpus.open(tmp_path / "corpus")
    assert list(corpus.pairs("train", "de")) == [("Übung macht den Meister.", "Practice makes perfect.")]
    assert corpus.manifest["preset"] == "proverbs" and corpus.manifest["inputs"] == ["proverbs"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--preset=none"], "--output is missing; name the directory to make with --output=DIR."),
        (["--preset=none", "--output=x"], "name your files with --input=DIR_OR_FILE"),
        (["--output=x", "texts"], "unexpected argument 'texts'; inputs are named with --input=texts."),
        (["--outptu=x"], "unknown flag --outptu. Did you mean output?"),
        (["--preset=debain", "--output=x"], "preset 'debain' is unknown. Did you mean debian"),
        (["--import=nowhere.py", "--output=x"], "--import=nowhere.py: no such file."),
    ],
)
def test_wrong_call_is_a_one_line_error(capsys, arguments, message):
    """A mistake on the command line is one line that names it, with exit status 2."""
    assert _run(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
