"""The command transcribe, from WAV files to texts."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Sequence

import numpy as np

from lingvo_moe import experiment as experiments
from lingvo_moe.cli import run_setup
from lingvo_moe.cli.run_config import TranscribeConfig
from lingvo_moe.data import wave_file
from lingvo_moe.data.speech import SpeechInput
from lingvo_moe.errors import UserError
from lingvo_moe.experiment import Experiment
from lingvo_moe.inference.recognizer import Recognizer
from lingvo_moe.utils import output_files

_logger = logging.getLogger(__name__)


def transcribe(config: TranscribeConfig, files: Sequence[str]):
    """`transcribe`: writes a line for each file, its path and its transcript, with a tab between them."""
    _check(config, files)
    name, experiment, engine = run_setup.set_up(config, "decode", {})
    recordings = [_read(file, experiment) for file in files]
    model = Recognizer(name, experiment, engine, config.log_directory(), reads_corpus=False)
    transcripts = model.transcribe_samples(recordings)
    with output_files.atomic_writer(config.output) as file:
        for path, transcript in zip(files, transcripts, strict=True):
            print(path, transcript or "", sep="\t", file=file)
    if long := [path for path, transcript in zip(files, transcripts, strict=True) if transcript is None]:
        frames = experiment.texts.source_length
        _logger.warning(
            "%s: longer than a row of %d frames, so not transcribed. Cut it, or pass --set input.source_length=N; the "
            "model was trained on recordings that fit.",
            ", ".join(long),
            frames,
        )


def _check(config: TranscribeConfig, files: Sequence[str]):
    """Raises UserError for another kind of model, no file, and a file to write to that cannot be used."""
    name = config.full_name()
    if not experiments.get(name).recognises:
        raise UserError(f"{name} does not recognise speech; `list` shows models, and those of `conformer` do.")
    if not files:
        raise UserError("transcribe takes WAV files; name one or more: transcribe --logdir=log a.wav b.wav.")
    if config.output != "-":
        output_files.check_own_paths({"--output": config.output}, {file: file for file in files})


def _read(file: str, experiment: Experiment) -> np.ndarray:
    """Returns the samples of a file; raises UserError if its sample rate is not that of the model."""
    rate, samples = wave_file.read(pathlib.Path(file))
    assert isinstance(experiment.input, SpeechInput)  # `Experiment.check` refuses others
    if rate != (expected := experiment.input.features.sample_rate):
        raise UserError(
            f"{file}: {rate} samples per second, but the model expects {expected} (input.features.sample_rate). "
            f"{wave_file.CONVERT.replace('RATE', str(expected))}"
        )
    return samples
