"""Protects the input pipeline from faults: vanishing files, and background errors that reach the caller unchanged."""

from __future__ import annotations

import itertools
import shutil
import threading

import numpy as np
import pytest

from lingvo_moe.data.batching import InputConfig
from lingvo_moe.data.corpus import Corpus
from lingvo_moe.data.corpus_stream import TrainPairs
from lingvo_moe.data.pipeline import TrainInput
from lingvo_moe.data.vocabularies import tokenizer_trainer
from lingvo_moe.errors import UserError
from lingvo_moe.testing.corpora import write_corpus

_CONFIG = InputConfig(batch_size=4, source_length=64, target_length=48, lookahead=3)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A directory with a corpus and its tokenizers."""
    directory = tmp_path_factory.mktemp("built")
    pairs = [(f"{'Haus ' * (i % 9)}Satz {i}", f"{'the ' * (i % 9)}sentence {i}") for i in range(300)]
    write_corpus(directory / "corpus", {"de": {"train": pairs, "valid": pairs[:9]}})
    sizes = {"source": 400, "target": 120}
    tokenizer_trainer.train(Corpus.open(directory / "corpus"), directory / "tokenizers", sizes, 5.0, 2000)
    return directory


@pytest.fixture()
def copied(built, tmp_path):
    shutil.copytree(built, tmp_path / "built")
    return tmp_path / "built"


def test_training_continues_when_files_vanish_after_its_start(built, copied):
    """Corpus and tokenizers are in memory by then: the batches are the same."""
    opened = TrainInput(copied / "corpus", copied / "tokenizers", _CONFIG)
    shutil.rmtree(copied)
    undisturbed = TrainInput(built / "corpus", built / "tokenizers", _CONFIG).batches()
    for (batch, state), (other, other_state) in itertools.islice(zip(opened.batches(), undisturbed), 20):
        assert state == other_state
        for side, arrays in batch.items():
            for name, values in arrays.items():
                np.testing.assert_array_equal(values, other[side][name])


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda path: path.unlink(), r"/train/de.tsv: cannot be read \(No such file or directory\)"),
        (lambda path: path.write_bytes(b""), "/train/de.tsv: the file is empty"),
        (
            lambda path: path.write_bytes(path.read_bytes()[:2000]),
            r"/train/de.tsv(:\d+: 0 tabs|: \d+ pairs, but corpus.json lists)",
        ),
        (
            lambda path: path.write_bytes(path.read_bytes().replace(b"Satz", b"Wort")),
            "/train/de.tsv: altered or replaced",
        ),
    ],
)
def test_corpus_that_changes_between_opening_and_reading_is_an_error(copied, monkeypatch, fault, message):
    """The error names the file."""
    open_corpus = Corpus.open

    def open_and_corrupt(directory):
        opened = open_corpus(directory)
        fault(opened.path("train", "de"))
        return opened

    monkeypatch.setattr(Corpus, "open", open_and_corrupt)
    with pytest.raises(UserError, match=message):
        TrainInput(copied / "corpus", copied / "tokenizers", _CONFIG)


@pytest.mark.parametrize(
    "error",
    [
        UserError("/data/de.tsv:7: corrupt. Build the corpus again."),
        OSError(5, "Input/output error", "/data/de.tsv"),
        KeyError("a bug"),
    ],
)
def test_error_in_the_background_reaches_the_caller_unchanged(built, monkeypatch, error):
    """Not wrapped by TensorFlow, and after the batches before it; no thread remains."""
    before = set(threading.enumerate())  # other tests leave endless streams until garbage collection
    opened = TrainInput(built / "corpus", built / "tokenizers", _CONFIG)
    read = TrainPairs._read_texts

    def read_and_fail(pairs: TrainPairs, indices: np.ndarray) -> np.ndarray:
        if indices[0] > 4000:  # each shard has read its first examples by then
            raise error
        return read(pairs, indices)

    monkeypatch.setattr(TrainPairs, "_read_texts", read_and_fail)
    stream, made = opened.batches(), 0
    with pytest.raises(type(error)) as raised:
        for _ in stream:
            made += 1
    assert made > 0 and raised.value is error
    stream.close()
    assert not [thread for thread in threading.enumerate() if thread not in before and thread.name.startswith("input")]
