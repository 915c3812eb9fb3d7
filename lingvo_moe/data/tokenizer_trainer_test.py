"""Training tokenizers is repeatable to the byte, gives small languages their pieces, never overwrites by surprise."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from lingvo_moe.data import tokenizer_trainer
from lingvo_moe.data.corpus import Corpus
from lingvo_moe.data.testing import write_corpus
from lingvo_moe.data.tokenizer import MANIFEST, Tokenizers
from lingvo_moe.errors import UserError

_SIZES = {"source": 450, "target": 120}
_FILES = ("source.model", "target.model", MANIFEST)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Corpus:
    """Two thousand German pairs and three Georgian ones."""
    german = [(f"Satz Nummer {i} über {'rote' if i % 3 else 'blaue'} Häuser.",
               f"Sentence number {i} about {'red' if i % 3 else 'blue'} houses.") for i in range(2000)]
    georgian = [("სახლი წითელია", "the house is red"), ("ღია ცის ფერი", "light blue"), ("გამარჯობა", "hello")]
    directory = tmp_path_factory.mktemp("corpora") / "corpus"
    return Corpus.open(write_corpus(directory, {"de": {"train": german}, "ka": {"train": georgian}}))


def train(corpus: Corpus, output: pathlib.Path, force: bool = False, **changes) -> tuple[Tokenizers, bool]:
    settings = {"vocabulary": _SIZES, "temperature": 5.0, "max_sentences": 1000, **changes}
    return tokenizer_trainer.train(corpus, output, force=force, **settings)


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory) -> pathlib.Path:
    output = tmp_path_factory.mktemp("trained") / "tokenizer"
    _, is_new = train(corpus, output)
    assert is_new
    return output


def contents(output: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in output.iterdir()}


def test_the_directory_loads_and_tells_what_it_is(corpus, trained):
    tokenizers = Tokenizers.load(trained)
    assert tokenizers.source.vocabulary_size == 450
    assert tokenizers.manifest["source"]["vocabulary_size"] == 450
    assert tokenizers.manifest["ids"] == {"pad": 0, "eos": 1, "bos": 2, "unk": 3}
    assert tokenizers.manifest["settings"]["corpus"] == corpus.fingerprint
    assert sorted(contents(trained)) == sorted(_FILES)


def test_a_small_corpus_gives_a_smaller_vocabulary_and_says_so(corpus, tmp_path):
    tokenizers, _ = train(corpus, tmp_path / "tokenizer", vocabulary={"source": 5000, "target": 3000})
    assert 300 < tokenizers.source.vocabulary_size < 5000
    assert tokenizers.manifest["target"]["vocabulary_size"] == tokenizers.target.vocabulary_size < 3000


def test_temperature_gives_a_small_language_its_words(corpus, tmp_path):
    """At temperature 5 three sentences of two thousand are a fifth of the sample; in proportion they are lost in it."""
    lengths = {}
    for temperature in (1.0, 5.0):
        tokenizers, _ = train(corpus, tmp_path / str(temperature), temperature=temperature)
        lengths[temperature] = len(tokenizers.source.encode(["გამარჯობა"])[0])
    assert lengths[5.0] < lengths[1.0]


def test_another_process_makes_the_same_bytes(corpus, trained, tmp_path):
    code = ("import pathlib, sys; from lingvo_moe.data import corpus, tokenizer_trainer; "
            "tokenizer_trainer.train(corpus.Corpus.open(sys.argv[1]), pathlib.Path(sys.argv[2]), "
            f"{_SIZES}, temperature=5.0, max_sentences=1000)")
    subprocess.run([sys.executable, "-c", code, corpus.directory, tmp_path / "again"], check=True, capture_output=True,
                   env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)})
    assert contents(tmp_path / "again") == contents(trained)


def test_what_is_up_to_date_is_left_as_it_is(corpus, trained):
    before = {name: (trained / name).stat().st_mtime_ns for name in _FILES}
    _, is_new = train(corpus, trained)
    assert not is_new
    assert before == {name: (trained / name).stat().st_mtime_ns for name in _FILES}


@pytest.mark.parametrize("change", [
    {"vocabulary": {"source": 460, "target": 120}}, {"temperature": 1.0}, {"max_sentences": 999}])
def test_other_settings_need_another_directory_or_force(corpus, trained, tmp_path, change):
    output = tmp_path / "tokenizer"
    train(corpus, output)
    with pytest.raises(UserError, match="--output=.* holds a tokenizer of another corpus or of other flags.*--force"):
        train(corpus, output, **change)
    assert contents(output) == contents(trained)
    _, is_new = train(corpus, output, force=True, **change)
    assert is_new
    assert contents(output) != contents(trained)


@pytest.mark.parametrize("name", ["source.model", "target.model"])
def test_a_damaged_model_is_trained_again(corpus, trained, tmp_path, name):
    """As after an interrupted run, which writes the manifest last."""
    output = tmp_path / "tokenizer"
    output.mkdir()
    for file, data in contents(trained).items():
        (output / file).write_bytes(data[:100] if file == name else data)
    _, is_new = train(corpus, output)
    assert is_new
    assert contents(output) == contents(trained)


def test_a_damaged_manifest_is_not_taken_for_ours(corpus, tmp_path):
    """It may be all that tells what a model depends on."""
    (tmp_path / MANIFEST).write_text("{")
    with pytest.raises(UserError, match="another corpus or of other flags"):
        train(corpus, tmp_path)
    assert train(corpus, tmp_path, force=True)[1]


def test_anything_else_in_the_way_is_left_alone(corpus, tmp_path):
    file, directory = tmp_path / "file", tmp_path / "directory"
    file.write_text("mine")
    directory.mkdir()
    (directory / "notes.txt").write_text("mine")
    for output in (file, directory):
        with pytest.raises(UserError, match="holds something other than a tokenizer and is left alone"):
            train(corpus, output, force=True)
    assert file.read_text() == (directory / "notes.txt").read_text() == "mine"


def test_a_vocabulary_smaller_than_the_alphabet_is_refused(corpus, tmp_path):
    with pytest.raises(UserError, match=r"--source_vocabulary=300 is too small: .* alone are 3\d\d pieces"):
        train(corpus, tmp_path / "tokenizer", vocabulary={"source": 300, "target": 120})
    assert not (tmp_path / "tokenizer").exists()


def test_an_interrupted_write_leaves_no_loadable_mixture(corpus, trained, tmp_path, monkeypatch):
    """A full disk after the first model: its name is in the error, no partial file stays, and the next run mends it."""
    replace = os.replace

    def fail_at_target(source, destination):
        if pathlib.Path(destination).name == "target.model":
            raise OSError(28, "No space left on device")
        replace(source, destination)

    output = tmp_path / "tokenizer"
    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space") as caught:
        patched.setattr(os, "replace", fail_at_target)
        train(corpus, output)
    assert caught.value.filename == str(output / "target.model")
    assert sorted(contents(output)) == ["source.model"]
    train(corpus, output)
    assert contents(output) == contents(trained)


def test_the_manifest_is_plain_json(trained):
    assert json.loads((trained / MANIFEST).read_text())["settings"]["temperature"] == "5.0"
