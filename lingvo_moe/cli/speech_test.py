"""A speech model is trained, resumed, evaluated and diagnosed by the commands of the others."""

from __future__ import annotations

import json
import pathlib
import re
import wave

import numpy as np
import pytest

from lingvo_moe.cli import main, speech
from lingvo_moe.data.corpus import Corpus
from lingvo_moe.data.log_mel import LogMel
from lingvo_moe.data.speech import RecordingReader
from lingvo_moe.data.vocabularies import tokenizer_trainer
from lingvo_moe.inference import recognizer
from lingvo_moe.inference.error_rates import ErrorRates
from lingvo_moe.inference.recognizer import VoiceScore, collapse
from lingvo_moe.testing import experiments as tiny
from lingvo_moe.testing import recordings

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_once")]

_SETTINGS = (
    "model.num_layers=1",
    "model.model_dim=8",
    "model.hidden_dim=16",
    "model.num_heads=2",
    "model.head_dim=4",
    "model.target_vocabulary=16",
    "model.subsampling_channels=4",
    "model.num_bins=8",
    "input.features.num_bins=8",
    f"input.features.sample_rate={recordings.SAMPLE_RATE}",
    "input.features.highest=4000",
    "input.batch_size=4",
    "input.source_length=160",
    "input.target_length=16",
    "training.log_every=1",
    "training.evaluate_every=2",
    "platform=cpu",
)


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    """The flags of a tiny model of generated recordings, trained for two steps and then, resumed, for two more."""
    directory = tmp_path_factory.mktemp("speech")
    corpus = Corpus.open(recordings.write_recordings(directory / "corpus"))
    tokenizer_trainer.train(corpus, directory / "tokenizers", {"source": 300, "target": 12}, 1.0, 1000)
    shared = ["--model=conformer.Small", *(f"--set={setting}" for setting in _SETTINGS)]
    shared += [f"--corpus={directory / 'corpus'}", f"--tokenizers={directory / 'tokenizers'}"]
    shared += [f"--logdir={directory / 'log'}"]
    for steps in (2, 4):
        assert main.main(["lingvo_moe", "train", *shared, f"--steps={steps}"]) == 0
    reported = tiny.curves(directory / "log")["loss"]
    assert set(reported) == {1, 2, 3, 4} and "source_gain" not in tiny.curves(directory / "log", "valid")
    return shared


def test_eval_prints_and_writes_error_rates_by_voice(flags, tmp_path, capsys):
    written = [f"--json={tmp_path / 'scores.json'}", f"--transcripts={tmp_path / 'transcripts.tsv'}"]
    assert main.main(["lingvo_moe", "eval", *flags, *written]) == 0
    printed = capsys.readouterr().out
    rows = json.loads((tmp_path / "scores.json").read_text())
    scores = {score["voice"]: score for score in rows["scores"]}
    assert rows["step"] == 4 and list(scores) == ["en_a", "en_b", "en_c", "trained voices", "held-out voices"]
    assert [score["is_group"] for score in rows["scores"]] == [False] * 3 + [True] * 2
    assert scores["en_c"]["train_recordings"] == scores["held-out voices"]["train_recordings"] == 0
    assert scores["trained voices"]["test_recordings"] == 8 and scores["held-out voices"]["test_recordings"] == 4
    assert all(voice in printed for voice in scores)
    lines = [line.split("\t") for line in (tmp_path / "transcripts.tsv").read_text().splitlines()]
    assert [line[0] for line in lines] == ["en_a"] * 4 + ["en_b"] * 4 + ["en_c"] * 4 and {*map(len, lines)} == {4}


def test_a_voice_that_the_corpus_lacks_is_named_before_anything_is_compiled(flags, capsys, monkeypatch):
    def compiled(*arguments):
        raise AssertionError("the model was compiled before the error was raised")

    monkeypatch.setattr(recognizer, "Recognizer", compiled)
    assert main.main(["lingvo_moe", "eval", *flags, "--languages=en_x"]) == 2
    assert "has no such voice; it has en_a, en_b, en_c" in capsys.readouterr().err


def test_diagnose_names_the_blocks(flags, capsys):
    assert main.main(["lingvo_moe", "diagnose", *flags]) == 0
    printed = capsys.readouterr().out
    assert all(
        block in printed for block in ("subsampling", "encoder/layer_0/convolution[0]", "all numbers are finite")
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["translate"], "conformer.Small recognises speech; it has nothing to translate"),
        (["eval", "--logdir=x", "--beam_size=4"], "--beam_size=4 is for translation"),
        (["plan", "--program=decode"], "conformer.Small neither translates nor generates"),
        (["eval", "--logdir=x", "--set=model.num_bins=44"], "model.num_bins is 44, but the input has 40"),
    ],
)
def test_mistakes_are_errors(arguments, message, capsys):
    assert main.main(["lingvo_moe", *arguments, "--model=conformer.Small"]) == 2
    assert message in capsys.readouterr().err


def _write_wave(path: pathlib.Path, samples: np.ndarray, rate: int = recordings.SAMPLE_RATE) -> str:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.astype("<i2").tobytes())
    return str(path)


def _without_corpus(flags: list[str]) -> list[str]:
    return [flag for flag in flags if not flag.startswith("--corpus=")]


def test_files_are_transcribed(flags, tmp_path, capsys):
    """As the same recordings of the corpus are; the corpus is not read, and a file that is too long is named."""
    corpus = Corpus.open(next(flag for flag in flags if flag.startswith("--corpus=")).partition("=")[2])
    pairs = list(corpus.pairs("test", "en_a"))[:3]
    reader = RecordingReader(corpus.directory, LogMel(sample_rate=recordings.SAMPLE_RATE, highest=4000))
    files = [
        _write_wave(tmp_path / f"{index}.wav", reader.samples(recording)) for index, (recording, _) in enumerate(pairs)
    ]
    long = _write_wave(tmp_path / "long.wav", np.zeros(2 * recordings.SAMPLE_RATE))
    own = [*_without_corpus(flags), "--set=corpus=nowhere"]
    assert main.main(["lingvo_moe", "transcribe", *own, files[0], long, *files[1:]]) == 0
    captured = capsys.readouterr()
    rows = dict(line.split("\t") for line in captured.out.splitlines())
    assert list(rows) == [files[0], long, *files[1:]] and rows[long] == ""
    assert f"{long}: longer than a row of 160 frames" in captured.err
    written = tmp_path / "transcripts.tsv"
    assert main.main(["lingvo_moe", "eval", *flags, f"--transcripts={written}"]) == 0
    heard = {line.split("\t")[1]: line.split("\t")[2] for line in written.read_text().splitlines()}
    assert [rows[file] for file in files] == [heard[recording] for recording, _ in pairs]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "transcribe takes WAV files; name one or more"),
        (["none.wav"], "none.wav: cannot be read (No such file or directory)"),
        (["--output=RATE.wav", "RATE.wav"], "expected the name of a file of its own, beside"),
        (["RATE.wav"], "16000 samples per second, but the model expects 8000 (input.features.sample_rate). Convert it"),
        (["TEXT.wav"], "TEXT.wav: not a WAV file of PCM samples"),
    ],
)
def test_files_that_cannot_be_transcribed_are_errors(flags, tmp_path, arguments, message, capsys):
    _write_wave(tmp_path / "RATE.wav", np.ones(100), 16_000)
    (tmp_path / "TEXT.wav").write_text("no recording")
    given = [re.sub("(RATE|TEXT)", rf"{tmp_path}/\1", argument) for argument in arguments]
    assert main.main(["lingvo_moe", "transcribe", *_without_corpus(flags), *given]) == 2
    assert message in capsys.readouterr().err


def test_a_model_of_texts_transcribes_nothing(capsys):
    assert main.main(["lingvo_moe", "transcribe", "--model=m4.Small", "--logdir=x", "a.wav"]) == 2
    assert "m4.Small does not recognise speech" in capsys.readouterr().err


def test_summary_has_groups_alone():
    rates = ErrorRates(1.0, 2.0)
    scores = [VoiceScore("en_a", 1, 2, rates, rates), VoiceScore("trained voices", 1, 2, rates, rates, is_group=True)]
    summary = speech.table(scores, summary=True)
    assert "en_a" not in summary and "trained voices" in summary and "en_a" in speech.table(scores)


def test_collapse_keeps_repeated_labels_that_a_blank_separates():
    assert collapse([0, 3, 3, 0, 3, 5, 5, 0]) == [3, 3, 5]
