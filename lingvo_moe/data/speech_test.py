"""Recordings become rows of features with their labels, whole and in order; corrupt corpora are errors."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lingvo_moe.data.batching import Example, InputConfig
from lingvo_moe.data.corpus import MANIFEST, Corpus
from lingvo_moe.data.log_mel import LogMel
from lingvo_moe.data.pipeline import EvalInput, TrainInput, merge_states
from lingvo_moe.data.speech import RecordingReader, SpeechInput, reference
from lingvo_moe.data.tokenizer import Tokenizers
from lingvo_moe.data.vocabularies import tokenizer_trainer
from lingvo_moe.errors import UserError
from lingvo_moe.lazy import tf
from lingvo_moe.testing import recordings

FEATURES = LogMel(sample_rate=recordings.SAMPLE_RATE, num_bins=8, highest=4000.0)
CONFIG = SpeechInput(batch_size=4, source_length=160, target_length=16, shards=2, features=FEATURES)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return recordings.write_recordings(tmp_path_factory.mktemp("speech") / "corpus")


@pytest.fixture(scope="module")
def tokenizers(corpus, tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizers") / "tokenizers"
    tokenizer_trainer.train(Corpus.open(corpus), directory, {"source": 300, "target": 12}, 1.0, 1000)
    return directory


@pytest.mark.slow
def test_batches_have_the_declared_arrays(corpus, tokenizers):
    batch, _ = next(TrainInput(corpus, tokenizers, CONFIG).batches())
    for side, specs in CONFIG.specs().items():
        assert {name: (a.shape, a.dtype.name) for name, a in batch[side].items()} == {
            name: (spec.shape, spec.dtype) for name, spec in specs.items()
        }
    assert np.all(batch["source"]["features"][batch["source"]["segment_ids"] == 0] == 0)


def test_every_held_out_recording_is_a_row_with_its_labels(corpus, tokenizers):
    opened, held_out = Corpus.open(corpus), EvalInput(corpus, tokenizers, CONFIG, split="test")
    expected = sorted(text for voice in opened.languages for _, text in opened.pairs("test", voice))
    found = []
    for batch in held_out.batches():
        target = batch["target"]
        rows = [labels[present == 1] for labels, present in zip(target["labels"], target["segment_ids"])]
        found += [text for text in Tokenizers.load(tokenizers).target.decode(rows) if text]
    assert sorted(found) == expected and held_out.num_rejected == 0


@pytest.mark.slow
def test_training_resumes_at_the_next_recording(corpus, tokenizers):
    """The batches after a state are those of an uninterrupted stream, also from shards of two processes."""
    source = TrainInput(corpus, tokenizers, CONFIG)
    stream = source.batches()
    batches = [next(stream) for _ in range(3)]
    resumed, _ = next(source.batches(batches[1][1]))
    np.testing.assert_array_equal(resumed["source"]["features"], batches[2][0]["source"]["features"])
    parts = [next(source.batches(shards=range(shard, shard + 1))) for shard in range(2)]
    joined = np.concatenate([part["target"]["labels"] for part, _ in parts])
    np.testing.assert_array_equal(joined, batches[0][0]["target"]["labels"])
    assert merge_states([state for _, state in parts]) == batches[0][1]


def test_graph_and_eager_features_are_equal(corpus):
    reader, opened = RecordingReader(corpus, FEATURES), Corpus.open(corpus)
    texts = [text for text, _ in list(opened.pairs("test", "en_c"))]
    in_graph = reader.in_graph(lambda function, argument, dtype: tf.numpy_function(function, [argument], dtype))
    ragged = tf.function(in_graph.tokenize)(tf.constant(texts))
    for eager, row in zip(reader.encode(texts), ragged, strict=True):
        np.testing.assert_allclose(eager, row.numpy(), atol=1e-4)  # logarithms of float32 sums in another order


@given(frames=st.integers(0, 200), labels=st.lists(st.integers(4, 6), max_size=20))
def test_a_recording_that_fits_has_an_alignment(frames, labels):
    """One position of four frames for each label, and one for a blank between equal ones."""
    blanks = sum(a == b for a, b in itertools.pairwise(labels))
    fits = 0 < frames <= 160 and 0 < len(labels) <= 16 and len(labels) + blanks <= (frames + 3) // 4
    example = Example(0, np.zeros((frames, 8), np.float32), np.array(labels, np.int32))
    assert CONFIG.fits(example) == fits


def test_a_corpus_of_texts_is_an_error(corpus, tmp_path):
    manifest = json.loads((corpus / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps({**manifest, "audio": None}))
    with pytest.raises(UserError, match="a corpus of texts, but the model reads recordings"):
        RecordingReader(tmp_path, FEATURES)


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_translation_model_does_not_read_recordings(corpus, tokenizers, split):
    """It would read `train/en_a 0 960`, a reference to a recording, as its source text."""
    config = InputConfig(batch_size=4, source_length=32, target_length=32)
    with pytest.raises(UserError, match="a corpus of recordings, but the model reads texts"):
        TrainInput(corpus, tokenizers, config) if split == "train" else EvalInput(corpus, tokenizers, config, split)


def test_a_language_model_reads_transcripts(corpus, tokenizers):
    config = InputConfig(batch_size=4, source_length=0, target_length=32)
    assert next(EvalInput(corpus, tokenizers, config, "test").batches())["target"]["segment_ids"].any()


def test_another_sample_rate_is_an_error(corpus):
    with pytest.raises(UserError, match="recordings of 8000 samples per second, but .* is 22050"):
        RecordingReader(corpus, LogMel())


@pytest.mark.parametrize(
    "text, message",
    [
        (reference("test", "en_c", 0, 10**15), "samples, but the corpus names"),
        (reference("test", "en_c", 10**15, 1), "samples, but the corpus names"),
        (reference("test", "en_z", 0, 1), "cannot be read"),
        (reference("test", "../x", 0, 1), "not a reference|not a language label"),
        ("test/en_c 0", "not a reference"),
        ("test/en_c -1 5", "not a reference"),
    ],
)
def test_a_reference_that_leads_nowhere_is_an_error(corpus, text, message):
    with pytest.raises(UserError, match=message):
        RecordingReader(corpus, FEATURES).samples(text)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"source_length": 150}, "source_length is 150; the frames of a row are a multiple of 4"),
        ({"packing": True}, "packing is true, but a row is one recording"),
        ({"target_length": 1}, "target_length is 1"),
    ],
)
def test_impossible_shapes_are_errors(changes, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(CONFIG, **changes)


@pytest.mark.parametrize(
    "fault, message",
    [
        (lambda path: path.unlink(), "en_b.pcm: missing, but corpus.json lists [0-9]* bytes"),
        (lambda path: path.write_bytes(b""), "en_b.pcm: 0 bytes, but corpus.json lists [0-9]* bytes"),
    ],
)
def test_lost_recordings_are_errors_at_the_start(corpus, tmp_path, fault, message):
    """Not when training draws one of them."""
    shutil.copytree(corpus, tmp_path / "lost")
    fault(tmp_path / "lost" / "train" / "en_b.pcm")
    with pytest.raises(UserError, match=f"{message}.*tools.build_speech, or tools.import_speech"):
        RecordingReader(tmp_path / "lost", FEATURES)


@pytest.mark.parametrize("name", ["../x", "/x"])
def test_a_manifest_names_no_file_outside_of_the_corpus(corpus, tmp_path, name):
    """Only the names of pairs are labels."""
    manifest = json.loads((corpus / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps({**manifest, "files": {name: 1}}))
    with pytest.raises(UserError, match="corpus.json, field files: the path .* is refused"):
        RecordingReader(tmp_path, FEATURES)


def test_a_recording_that_is_cut_off_ends_training_with_its_name(corpus, tokenizers, tmp_path):
    """Not with a page of TensorFlow, which calls the function that reads it, nor with a signal."""
    shutil.copytree(corpus, tmp_path / "cut")
    opened = TrainInput(tmp_path / "cut", tokenizers, CONFIG)
    for path in (tmp_path / "cut" / "train").glob("*.pcm"):
        path.write_bytes(path.read_bytes()[:2])
    with pytest.raises(UserError, match="en_.*pcm: 1 samples, but the corpus names .*tools.build_speech"):
        next(opened.batches())
