"""Protects tokenizer training: reproducible bytes, pieces for small languages, no unexpected overwriting."""

from __future__ import annotations

import json
import logging
import lzma
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from lingvo_moe.data.corpus import Corpus
from lingvo_moe.data.tokenizer import MANIFEST, Tokenizers
from lingvo_moe.data.vocabularies import tokenizer_trainer
from lingvo_moe.errors import UserError
from lingvo_moe.testing.corpora import write_corpus

_SIZES = {"source": 450, "target": 120}
_FILES = ("source.model", "target.model", MANIFEST)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Corpus:
    """Two thousand German pairs and three Georgian ones."""
    german = [
        (
            f"Satz Nummer {i} über {'rote' if i % 3 else 'blaue'} Häuser.",
            f"Sentence number {i} about {'red' if i % 3 else 'blue'} houses.",
        )
        for i in range(2000)
    ]
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


def test_trained_directory_loads_with_its_manifest(corpus, trained):
    """Sizes, special ids and the corpus's fingerprint."""
    tokenizers = Tokenizers.load(trained)
    assert tokenizers.source.vocabulary_size == 450
    assert tokenizers.manifest["source"]["vocabulary_size"] == 450
    assert tokenizers.manifest["ids"] == {"pad": 0, "eos": 1, "bos": 2, "unk": 3}
    assert tokenizers.manifest["settings"]["corpus"] == corpus.fingerprint
    assert sorted(contents(trained)) == sorted(_FILES)


def test_shared_tokenizer_is_that_of_both_sides(corpus, tmp_path):
    """One model of all languages and English, for tied embeddings; changing back needs --force."""
    output = tmp_path / "tokenizer"
    tokenizers, _ = train(corpus, output, vocabulary={tokenizer_trainer.SHARED: 450})
    assert tokenizers.source == tokenizers.target and tokenizers.source.vocabulary_size == 450
    assert sorted(contents(output)) == sorted(("shared.model", MANIFEST))
    for text in ("Satz über rote Häuser", "გამარჯობა", "Sentence about blue houses"):
        assert tokenizers.target.decode(tokenizers.target.encode([text])) == [text]
    assert train(corpus, output, vocabulary={tokenizer_trainer.SHARED: 450})[1] is False
    with pytest.raises(UserError, match="a tokenizer of another corpus or of other flags"):
        train(corpus, output)
    train(corpus, output, force=True)
    assert sorted(contents(output)) == sorted(_FILES)


def test_small_corpus_gives_a_smaller_vocabulary(corpus, tmp_path):
    """The manifest has the actual size."""
    tokenizers, _ = train(corpus, tmp_path / "tokenizer", vocabulary={"source": 5000, "target": 3000})
    assert 300 < tokenizers.source.vocabulary_size < 5000
    assert tokenizers.manifest["target"]["vocabulary_size"] == tokenizers.target.vocabulary_size < 3000


def test_temperature_gives_a_small_language_its_pieces(corpus, tmp_path):
    """At temperature 5 three sentences of two thousand are a fifth of the sample, so its words become pieces."""
    lengths = {}
    for temperature in (1.0, 5.0):
        tokenizers, _ = train(corpus, tmp_path / str(temperature), temperature=temperature)
        lengths[temperature] = len(tokenizers.source.encode(["გამარჯობა"])[0])
    assert lengths[5.0] < lengths[1.0]


def test_another_process_writes_the_same_bytes(corpus, trained, tmp_path):
    """Whatever the hash seed of Python."""
    code = (
        "import pathlib, sys; from lingvo_moe.data import corpus; "
        "from lingvo_moe.data.vocabularies import tokenizer_trainer; "
        "tokenizer_trainer.train(corpus.Corpus.open(sys.argv[1]), pathlib.Path(sys.argv[2]), "
        f"{_SIZES}, temperature=5.0, max_sentences=1000)"
    )
    subprocess.run(
        [sys.executable, "-c", code, corpus.directory, tmp_path / "second"],
        check=True,
        capture_output=True,
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert contents(tmp_path / "second") == contents(trained)


def test_up_to_date_tokenizer_is_not_trained_again(corpus, trained):
    """Its files are not even written."""
    before = {name: (trained / name).stat().st_mtime_ns for name in _FILES}
    _, is_new = train(corpus, trained)
    assert not is_new
    assert before == {name: (trained / name).stat().st_mtime_ns for name in _FILES}


@pytest.mark.parametrize(
    "change", [{"vocabulary": {"source": 460, "target": 120}}, {"temperature": 1.0}, {"max_sentences": 999}]
)
def test_other_settings_need_another_directory_or_force(corpus, trained, tmp_path, change):
    """A trained model depends on its tokenizer."""
    output = tmp_path / "tokenizer"
    train(corpus, output)
    with pytest.raises(UserError, match="--output=.* has a tokenizer of another corpus or of other flags.*--force"):
        train(corpus, output, **change)
    assert contents(output) == contents(trained)
    _, is_new = train(corpus, output, force=True, **change)
    assert is_new
    assert contents(output) != contents(trained)


@pytest.mark.parametrize("name", ["source.model", "target.model"])
def test_corrupt_model_is_trained_again(corpus, trained, tmp_path, name):
    """The same settings give the same bytes, so that is a repair."""
    output = tmp_path / "tokenizer"
    output.mkdir()
    for file, data in contents(trained).items():
        (output / file).write_bytes(data[:100] if file == name else data)
    _, is_new = train(corpus, output)
    assert is_new
    assert contents(output) == contents(trained)


def test_tokenizer_with_a_corrupt_manifest_is_replaced_only_by_force(corpus, tmp_path):
    """Its settings are not known, and a model may depend on it."""
    (tmp_path / MANIFEST).write_text("{")
    with pytest.raises(UserError, match="another corpus or of other flags"):
        train(corpus, tmp_path)
    assert train(corpus, tmp_path, force=True)[1]


def test_models_without_a_manifest_are_replaced_only_by_force(corpus, tmp_path):
    """They are of another program, or all that is left of a directory."""
    output = tmp_path / "output"
    output.mkdir()
    (output / "source.model").write_text("mine")
    with pytest.raises(UserError, match="--output=.* has models, but no tokenizer.json.*--force"):
        train(corpus, output)
    assert (output / "source.model").read_text() == "mine"
    assert train(corpus, output, force=True)[1]


def test_a_tokenizer_that_another_process_made_meanwhile_is_kept(corpus, tmp_path, monkeypatch):
    """One with other flags is refused, as if it had been there before."""
    train_one, output = tokenizer_trainer._train_one, tmp_path / "output"

    def trained_by_another(*arguments):
        monkeypatch.setattr(tokenizer_trainer, "_train_one", train_one)
        train(corpus, output, max_sentences=999)
        return train_one(*arguments)

    monkeypatch.setattr(tokenizer_trainer, "_train_one", trained_by_another)
    with pytest.raises(UserError, match="another corpus or of other flags"):
        train(corpus, output)
    assert not train(corpus, output, max_sentences=999)[1] and list(tmp_path.iterdir()) == [output]


def test_other_files_are_never_replaced(corpus, tmp_path):
    """Not even with --force."""
    file, directory = tmp_path / "file", tmp_path / "directory"
    file.write_text("mine")
    directory.mkdir()
    (directory / "notes.txt").write_text("mine")
    for output in (file, directory):
        with pytest.raises(
            UserError, match="is a (file|directory with files that are not of a tokenizer), and is left unchanged"
        ):
            train(corpus, output, force=True)
    assert file.read_text() == (directory / "notes.txt").read_text() == "mine"


def test_vocabulary_smaller_than_the_alphabet_is_an_error(corpus, tmp_path):
    """The error names the flag and the minimum."""
    with pytest.raises(
        UserError, match=r"--source_vocabulary=300 is too small: the special ids and bytes .* 3\d\d pie"
    ):
        train(corpus, tmp_path / "tokenizer", vocabulary={"source": 300, "target": 120})
    with pytest.raises(UserError, match=r"--target_vocabulary=20 is too small: the special ids and the .* \d\d pieces"):
        train(corpus, tmp_path / "tokenizer", vocabulary={"source": 450, "target": 20})
    assert not (tmp_path / "tokenizer").exists()


@pytest.mark.parametrize("pair", [("a", "b"), ("。", "..."), ("▁ <s> </s> <0x41>", "<pad> ▁")])
def test_one_pair_is_enough(tmp_path, pair):
    """Also with symbols that SentencePiece uses itself."""
    corpus = Corpus.open(write_corpus(tmp_path / "corpus", {"de": {"train": [pair]}}))
    tokenizers, _ = train(corpus, tmp_path / "tokenizer")
    assert tokenizers.source.decode(tokenizers.source.encode(["a"])) == ["a"]


@pytest.mark.parametrize("pair", [("Wort " * 1000, "word " * 1000), ("\u200b", "\u200b")])
def test_corpus_without_usable_sentences_is_an_error_with_the_remedy(tmp_path, pair):
    """SentencePiece skips sentences that are too long for it, and invisible characters."""
    corpus = Corpus.open(write_corpus(tmp_path / "corpus", {"de": {"train": [pair]}}))
    with pytest.raises(UserError, match="source.model cannot be trained .* not longer than 4192 bytes"):
        train(corpus, tmp_path / "tokenizer")
    assert not (tmp_path / "tokenizer").exists()


class Killed(BaseException):
    """Simulates SIGKILL: nothing can be renamed or deleted after it."""


_STEPS = {"write_bytes": 3, "rename": 2}  # a replacement writes three files and renames two directories


@pytest.mark.parametrize("method, count", [(method, count) for method, most in _STEPS.items() for count in range(most)])
def test_process_killed_at_any_step_loses_no_tokenizer(corpus, trained, tmp_path, monkeypatch, method, count):
    """After `count` calls of `method` the process does not even clean up. The next run finds the old tokenizer."""
    output = shutil.copytree(trained, tmp_path / "tokenizer")
    original, calls = getattr(pathlib.Path, method), []

    def die(path, *arguments):
        calls.append(path)
        if len(calls) > count:
            raise Killed
        return original(path, *arguments)

    def die_before_deleting(*_, **options):
        raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(pathlib.Path, method, die)
        patched.setattr(shutil, "rmtree", die_before_deleting)
        train(corpus, output, force=True, max_sentences=999)
    (partial,) = tmp_path.glob(".tokenizer.partial-*")  # the test did leave something to remove
    os.utime(partial, (0, 0))
    _, is_new = train(corpus, output)
    assert not is_new
    assert contents(output) == contents(trained)
    assert os.listdir(tmp_path) == ["tokenizer"]


def test_process_killed_before_deleting_the_old_tokenizer_leaves_the_new_one(corpus, trained, tmp_path):
    """The next run removes the old directory."""
    output = shutil.copytree(trained, tmp_path / "tokenizer")
    shutil.copytree(trained, tmp_path / ".tokenizer.replaced")
    assert not train(corpus, output)[1]
    assert os.listdir(tmp_path) == ["tokenizer"]


def test_full_disk_leaves_the_old_tokenizer_and_nothing_else(corpus, trained, tmp_path, monkeypatch):
    """The error names the output directory."""
    output, write = shutil.copytree(trained, tmp_path / "tokenizer"), pathlib.Path.write_bytes

    def fail_at_target(path, data):
        if path.name == "target.model":
            raise OSError(28, "No space left on device", str(path))
        return write(path, data)

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space") as caught:
        patched.setattr(pathlib.Path, "write_bytes", fail_at_target)
        train(corpus, output, force=True, max_sentences=999)
    assert caught.value.filename == str(output)
    assert contents(output) == contents(trained)
    assert os.listdir(tmp_path) == ["tokenizer"]


def test_a_directory_with_a_compressed_model_is_one_of_tokenizers(corpus, trained, tmp_path):
    """Other flags than those it was trained with are refused by themselves, not as other files."""
    output = shutil.copytree(trained, tmp_path / "tokenizer")
    model = output / "source.model"
    (output / "source.model.xz").write_bytes(lzma.compress(model.read_bytes()))
    model.unlink()
    assert not train(corpus, output)[1]
    with pytest.raises(UserError, match="has a tokenizer of another corpus or of other flags"):
        train(corpus, output, max_sentences=999)


def test_recovery_never_removes_other_files(corpus, tmp_path):
    """A user's directory may have the name of a temporary one."""
    (tmp_path / ".tokenizer.replaced").mkdir()
    (tmp_path / ".tokenizer.replaced" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=".tokenizer.replaced is a directory with files that are not of a tokenizer"):
        train(corpus, tmp_path / "tokenizer")
    assert (tmp_path / ".tokenizer.replaced" / "notes.txt").read_text() == "mine"


def test_link_is_kept_and_the_current_directory_is_accepted(corpus, trained, tmp_path, monkeypatch):
    """--output may be a link or `.`."""
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    train(corpus, link)
    assert link.is_symlink() and contents(real) == contents(trained)
    monkeypatch.chdir(real)
    assert not train(corpus, pathlib.Path("."))[1]


def test_each_stage_is_logged_with_its_duration(corpus, tmp_path, capsys, caplog):
    """SentencePiece itself is silent, for many seconds with a real corpus."""
    with caplog.at_level(logging.INFO, logger=tokenizer_trainer.__name__):
        train(corpus, tmp_path / "tokenizer")
    output = capsys.readouterr().err + "\n".join(caplog.messages)
    for pattern in (
        "reading the corpus: ",
        r"training source.model on \d+ different sentences",
        r"trained source.model in \d+ s",
        "training target.model on ",
        r"trained target.model in \d+ s",
    ):
        assert re.search(pattern, output), pattern


def test_manifest_is_plain_json(trained):
    """An infinite temperature, too, is a string."""
    assert json.loads((trained / MANIFEST).read_text())["settings"]["temperature"] == "5.0"
