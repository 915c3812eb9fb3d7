"""A speech corpus has each sentence as it is written, holds sentences and voices out, and is the same every time."""

from __future__ import annotations

import numpy as np
import pytest

from lingvo_moe.data.corpora import speech_builder
from lingvo_moe.data.corpora.espeak import Espeak
from lingvo_moe.data.corpora.speech_builder import HELD_OUT_VOICES, TRAINING_VOICES, transcript_of
from lingvo_moe.data.corpus import Corpus
from lingvo_moe.data.log_mel import LogMel
from lingvo_moe.data.speech import AUDIO_SUFFIX, ENCODING, RecordingReader
from lingvo_moe.errors import UserError
from lingvo_moe.testing.corpora import write_corpus

WORDS = ("red", "blue", "green", "house", "tree", "river", "stone", "bird")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Forty German pairs; one test sentence is also a training sentence."""
    train = [(f"{a} und {b}", f"The {a}, and the {b}.") for a in WORDS[:5] for b in WORDS]
    held_out = {
        "valid": [("x", "A new valid sentence")],
        "test": [("y", "Some test here"), ("z", "The red and the red")],
    }
    return Corpus.open(write_corpus(tmp_path_factory.mktemp("texts") / "corpus", {"de": {"train": train, **held_out}}))


@pytest.fixture(scope="module")
def built(texts, tmp_path_factory):
    directory = tmp_path_factory.mktemp("speech") / "corpus"
    return speech_builder.build(texts, directory)[0]


def pairs_of(corpus: Corpus, split: str) -> list[tuple[str, str, str]]:
    return [(voice, *pair) for voice in corpus.languages_of(split) for pair in corpus.pairs(split, voice)]


def test_held_out_sentences_and_voices_are_not_trained_on(built):
    train, test = pairs_of(built, "train"), pairs_of(built, "test")
    assert not {text for *_, text in train} & {text for *_, text in test}
    assert {voice for voice, *_ in train} <= {f"en_{variant}" for variant in TRAINING_VOICES}
    for variant in HELD_OUT_VOICES:
        assert {text for voice, _, text in test if voice == f"en_{variant}"} == {
            "some test here",
            "the red and the red",
        }


def test_recordings_are_as_long_as_speech(built):
    """Between a twentieth and half a second for each letter, and not silent."""
    reader = RecordingReader(built.directory, LogMel())
    for _, text, transcript in pairs_of(built, "test"):
        samples = reader.samples(text)
        assert 0.05 < len(samples) / 22_050 / len(transcript) < 0.5
        assert np.abs(samples).max() > 1000


def test_references_divide_the_recordings_of_a_voice(built):
    """Each sample belongs to one sentence."""
    for voice in built.languages_of("test"):
        ranges = [map(int, text.split()[1:]) for text, _ in built.pairs("test", voice)]
        ends = [0]
        for start, count in ranges:
            assert start == ends[-1]
            ends.append(start + count)
        size = (built.directory / "test" / f"{voice}{AUDIO_SUFFIX}").stat().st_size
        assert len(ends) > 1 and size == ends[-1] * ENCODING.itemsize


def test_a_complete_corpus_is_left_unchanged(texts, built):
    again, is_new = speech_builder.build(texts, built.directory)
    assert not is_new and again.fingerprint == built.fingerprint
    with pytest.raises(UserError, match="has a corpus of other inputs"):
        speech_builder.build(texts, built.directory, max_characters=20)


@pytest.mark.parametrize(
    "languages, max_characters, message",
    [
        (["en", "dee"], 48, "^--languages=dee: --preset=none has no sentences in it; it has en, de. Did you mean de"),
        (["de", "en"], 8, "^--languages=en: no sentence of --preset=none .* at most --max_characters=8; raise these"),
    ],
)
def test_a_language_without_recordings_is_an_error(texts, tmp_path, languages, max_characters, message):
    """It names the flags, and not the texts, whose directory is gone by the time of the message."""
    with pytest.raises(UserError, match=message):
        speech_builder.build(texts, tmp_path / "speech", languages, max_characters)
    assert not list(tmp_path.iterdir())


def test_a_corpus_that_another_process_has_built_meanwhile_is_kept(texts, tmp_path, monkeypatch):
    """Speaking takes minutes; both began when there was none."""
    output, speak = tmp_path / "speech", speech_builder._write

    def let_another_build(*arguments):
        write_corpus(output, {"de": {"train": [("der", "the")]}})
        speak(*arguments)

    monkeypatch.setattr(speech_builder, "_write", let_another_build)
    with pytest.raises(UserError, match="has a corpus of other inputs"):
        speech_builder.build(texts, output, ["en"], max_characters=20)
    assert Corpus.open(output).languages == ("de",)


@pytest.mark.parametrize(
    "sentence, transcript",
    [
        ("Don't stop, please!", "don't stop please"),
        ("A well-known “word”.", "a well known word"),
        ("Über uns", "über uns"),
        ("Delete 3 files", None),
        ("Save as PDF", None),
        ("Hello %s", None),
        ("...", None),
    ],
)
def test_transcripts_are_what_is_said(sentence, transcript):
    assert transcript_of(sentence) == transcript


def test_an_unknown_voice_is_an_error():
    with pytest.raises(UserError, match="no voice 'tlh-x'"):
        Espeak().synthesize("a", "tlh-x")
