"""A table of recordings becomes a corpus with their samples and transcripts; what cannot be used is named."""

from __future__ import annotations

import wave

import numpy as np
import pytest

from lingvo_moe.data.corpora import recordings_table
from lingvo_moe.data.corpus import Corpus
from lingvo_moe.data.log_mel import LogMel
from lingvo_moe.data.speech import RecordingReader
from lingvo_moe.errors import UserError

LINES = {
    "train\ten_anna\ta.wav\tgood  morning": 7,
    "train\ten_bob\tb.wav\tgood evening": 5,
    "train\ten_anna\tc.wav\tgood night": 3,
    "test\ten_eve\td.wav\tgood bye": 4,
}


def write_wav(path, samples: np.ndarray, rate: int = 8000, channels: int = 1):
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, samples.itemsize, rate, 0, "NONE", ""))
        file.writeframes(samples.tobytes())


def samples_of(count: int) -> np.ndarray:
    return np.arange(count, dtype="<i2") - count * 1000


@pytest.fixture
def table(tmp_path):
    for line, count in LINES.items():
        write_wav(tmp_path / line.split("\t")[2], samples_of(count))
    path = tmp_path / "recordings.tsv"
    path.write_text("\n".join([*LINES, "", ""]), encoding="utf-8")
    return path


def test_recordings_keep_samples_split_voice_and_transcript(table, tmp_path):
    corpus, is_new = recordings_table.build(table, tmp_path / "corpus")
    reader = RecordingReader(corpus.directory, LogMel(sample_rate=8000, highest=4000.0))
    found = {
        (split, voice, transcript): reader.samples(recording).tolist()
        for split in ("train", "valid", "test")
        for voice in corpus.languages_of(split)
        for recording, transcript in corpus.pairs(split, voice)
    }
    expected = {line: samples_of(count).tolist() for line, count in LINES.items()}
    assert is_new and found == {
        (split, voice, " ".join(text.split())): samples
        for (split, voice, _, text), samples in ((line.split("\t"), samples) for line, samples in expected.items())
    }
    report = (corpus.directory / "report.txt").read_text()
    assert report.startswith("Speech corpus of 3 voices, preset recordings\n") and "WARNING" not in report
    assert "different transcripts: 4; 1 are in the test and 0 in the validation split\n" in report


def test_a_corpus_is_built_again_only_for_other_recordings(table, tmp_path):
    """Also when a file has other samples, and the table is the same."""
    first, _ = recordings_table.build(table, tmp_path / "corpus")
    assert recordings_table.build(table, tmp_path / "corpus")[1] is False
    write_wav(tmp_path / "b.wav", samples_of(5)[::-1])
    with pytest.raises(UserError, match="replace it with --force"):
        recordings_table.build(table, tmp_path / "corpus")
    assert recordings_table.build(table, tmp_path / "corpus", force=True)[1]
    assert Corpus.open(tmp_path / "corpus").fingerprint != first.fingerprint


@pytest.mark.parametrize(
    "line, message",
    [
        ("train\ten_a\ta.wav", "tsv:5: 3 fields, .* expected four: split, voice, WAV file, transcript"),
        ("dev\ten_a\te.wav\tx", "tsv:5: the split is 'dev'; expected one of train, valid, test"),
        ("train\tAnna\te.wav\tx", "tsv:5: the voice: 'Anna' is not a language label"),
        ("train\t../x\te.wav\tx", "tsv:5: the voice: '../x' is not a language label"),
        ("train\ten_a\te.wav\t ", "tsv:5: the transcript is empty"),
        ("train\ten_a\ta.wav\tx", "tsv:5: .*a.wav is the recording of .*tsv:1 already"),
        ("train\ten_a\tnone.wav\tx", "tsv:5: .*none.wav: cannot be read .No such file"),
        ("train\ten_a\trecordings.tsv\tx", "tsv:5: .*recordings.tsv: not a WAV file of PCM samples .* ffmpeg"),
        ("train\ten_a\tfast.wav\tx", "tsv:5: .*fast.wav has 16000 samples per second, but .*a.wav has 8000; .* ffmpeg"),
        ("train\ten_a\tstereo.wav\tx", "tsv:5: .*stereo.wav: 2 channels of 16 bits; expected one of 16 bits"),
        ("train\ten_a\tbytes.wav\tx", "tsv:5: .*bytes.wav: 1 channel of 8 bits"),
        ("train\ten_a\tempty.wav\tx", "tsv:5: .*empty.wav: no sample; leave it out"),
    ],
)
def test_what_cannot_be_used_is_named(table, tmp_path, line, message):
    """With the line of the table, before anything is written."""
    write_wav(tmp_path / "fast.wav", samples_of(4), rate=16_000)
    write_wav(tmp_path / "stereo.wav", samples_of(4), channels=2)
    write_wav(tmp_path / "bytes.wav", np.zeros(4, np.uint8))
    write_wav(tmp_path / "empty.wav", samples_of(0))
    table.write_text("\n".join([*LINES, line]), encoding="utf-8")
    with pytest.raises(UserError, match=message):
        recordings_table.build(table, tmp_path / "corpus")
    assert not (tmp_path / "corpus").exists()


def test_a_table_without_recordings_is_an_error(tmp_path):
    (tmp_path / "empty.tsv").write_text("\n")
    for name, message in (("empty.tsv", "no recording. A line is split, voice"), ("none.tsv", "cannot be read")):
        with pytest.raises(UserError, match=f"--table=.*{name}: {message}"):
            recordings_table.build(tmp_path / name, tmp_path / "corpus")
