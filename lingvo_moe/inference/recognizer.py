"""Speech recognition with a trained model: error rates on the held-out recordings of a speech corpus, by voice."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np

from lingvo_moe.data.batching import Example
from lingvo_moe.data.corpus import Corpus
from lingvo_moe.data.speech import SpeechInput, features_of
from lingvo_moe.engines.base import Engine
from lingvo_moe.errors import UserError
from lingvo_moe.experiment import Experiment
from lingvo_moe.inference.error_rates import ErrorRates, majority_transcript
from lingvo_moe.inference.trained_weights import trained_weights
from lingvo_moe.layers.ctc import BLANK
from lingvo_moe.utils import output_files, progress

Recording = TypeVar("Recording")  # a reference, or samples


@dataclasses.dataclass(frozen=True)
class VoiceScore:
    """The error rates of one voice, or of several together.

    Attributes:
      voice: its label in the corpus, or what the voices have in common.
      train_recordings: 0 for a held-out voice.
      test_recordings: those that were scored.
      rates: of the model's transcripts.
      majority: of `majority_transcript`, the majority baseline: it ignores the audio.
      is_group: whether it is of several together.
    """

    voice: str
    train_recordings: int
    test_recordings: int
    rates: ErrorRates
    majority: ErrorRates
    is_group: bool = False


@dataclasses.dataclass(frozen=True)
class Transcribed:
    """A held-out recording and its transcript.

    Attributes:
      voice: its label in the corpus.
      recording: the reference to it.
      transcript: of the model; None if the recording does not fit into a row.
      reference: of the corpus.
    """

    voice: str
    recording: str
    transcript: str | None
    reference: str


class Recognizer:
    """Transcribes recordings with the newest checkpoint of a log directory.

    Attributes:
      step: the training step of the checkpoint.
    """

    def __init__(
        self,
        name: str,
        experiment: Experiment,
        engine: Engine,
        logdir: str | pathlib.Path,
        reads_corpus: bool = True,
    ):
        """Compiles the program and restores the weights; the first arguments are those of `translator.Translator`.

        `reads_corpus` is for `transcribe`; without it, there need not be a corpus.

        Raises:
          UserError: no recordings, no tokenizer or one too large for the model, no checkpoint or one of another model.
        """
        self._input, self._tokenizer = experiment.texts, experiment.open_tokenizers().target
        self._reader = None
        if reads_corpus:
            self._reader = self._input.open_readers(experiment.corpus, experiment.tokenizers).by_side["source"]
        with trained_weights(name, experiment, logdir) as restore:
            self._program = engine.compile(experiment.steps.transcribe(self._input.specs()["source"]))
            self.step, self._theta = restore(self._program.shardings("theta"))

    def transcribe(self, recordings: Sequence[str]) -> list[str | None]:
        """Returns the transcript of each reference to a recording; None of one that does not fit into a row."""
        reader = self._reader
        if reader is None:
            raise ValueError("references are to recordings of a corpus: make the recognizer with reads_corpus=True.")
        return self._transcribe(recordings, reader.encode)

    def transcribe_samples(self, recordings: Sequence[np.ndarray]) -> list[str | None]:
        """Returns the transcript of each recording, samples `[count] int16`; None of one that does not fit."""
        assert isinstance(self._input, SpeechInput)
        features = self._input.features
        return self._transcribe(recordings, lambda chunk: [features_of(samples, features) for samples in chunk])

    def _transcribe(
        self, recordings: Sequence[Recording], encode: Callable[[Sequence[Recording]], list[np.ndarray]]
    ) -> list[str | None]:
        transcripts: list[str | None] = [None] * len(recordings)
        size = self._input.batch_size
        with progress.bar("transcribing", len(recordings), "recordings") as advance:
            for start in range(0, len(recordings), size):
                chunk = recordings[start : start + size]
                for index, transcript in self._transcribe_batch(encode(chunk)):
                    transcripts[start + index] = transcript
                advance(len(chunk))
        return transcripts

    def _transcribe_batch(self, recordings: Sequence[np.ndarray]) -> list[tuple[int, str]]:
        """Returns (index, transcript) of those of at most `batch_size` recordings, as features, that fit into a row."""
        rows, fitting = self._input.empty_rows(self._input.batch_size), []
        for index, features in enumerate(recordings):
            if len(features) <= self._input.source_length:
                rows.add(Example(index, features, np.zeros(0, np.int32)))
                fitting.append(index)
        classes = np.asarray(self._program({"theta": self._theta, "source": rows.batch["source"]})["classes"])
        labels = [collapse(row) for row in classes[: len(fitting)]]
        return list(zip(fitting, self._tokenizer.decode(labels), strict=True))


def collapse(classes: Iterable[int]) -> list[int]:
    """Returns the labels that the classes of consecutive positions stand for: each run once, without blanks."""
    return [int(label) for label, _ in itertools.groupby(classes) if label != BLANK]


def transcribe_held_out(
    recognizer: Recognizer, corpus: Corpus, voices: Sequence[str] = (), max_pairs: int = 100, split: str = "test"
) -> list[Transcribed]:
    """Transcribes up to `max_pairs` recordings of each voice, see `Corpus.sample`.

    Args:
      recognizer: the model.
      corpus: whose `split` is transcribed.
      voices: which; all that have the split if empty.
      max_pairs: of each voice.
      split: `test` or `valid`.

    Raises:
      UserError: as `Corpus.choose`, or no recording fits.
    """
    chosen = corpus.choose(split, voices)
    pairs = [(voice, *pair) for voice in chosen for pair in corpus.sample(split, voice, max_pairs)]
    transcripts = recognizer.transcribe([recording for _, recording, _ in pairs])
    if all(transcript is None for transcript in transcripts):
        raise UserError(
            f"none of the {len(transcripts)} {split} recordings fits input.source_length; raise it with --set "
            f"input.source_length=..."
        )
    return [
        Transcribed(voice, recording, transcript, reference)
        for (voice, recording, reference), transcript in zip(pairs, transcripts, strict=True)
    ]


def score(corpus: Corpus, transcribed: Sequence[Transcribed]) -> tuple[list[VoiceScore], int]:
    """Scores transcripts.

    Args:
      corpus: of the recordings.
      transcribed: by voice, at least one of them with a transcript.

    Returns:
      (scores, the number of recordings left out because they do not fit into a row). The scores are of each voice, and
      of `trained voices` and `held-out voices` together, where there are any.
    """
    scored: dict[str, list[tuple[str, str]]] = {one.voice: [] for one in transcribed}
    for one in transcribed:
        if one.transcript is not None:
            scored[one.voice].append((one.transcript, one.reference))
    trained = [voice for voice in scored if corpus.count("train", voice)]
    groups = {voice: [voice] for voice in scored} | {
        "trained voices": trained,
        "held-out voices": [voice for voice in scored if voice not in trained],
    }
    majority = majority_transcript(
        [text for voice in corpus.languages_of("train") for _, text in corpus.pairs("train", voice)]
    )
    scores = []
    for name, members in groups.items():
        if of_group := [pair for voice in members for pair in scored[voice]]:
            train_recordings = sum(corpus.count("train", voice) for voice in members)
            scores.append(_score(name, train_recordings, of_group, majority, is_group=name not in scored))
    return scores, len(transcribed) - sum(map(len, scored.values()))


def write(path: str, transcribed: Sequence[Transcribed]):
    """Writes a line for each recording that was transcribed: voice, recording, transcript, reference, with tabs."""
    with output_files.atomic_writer(path) as file:
        for one in transcribed:
            if one.transcript is not None:
                print(one.voice, one.recording, one.transcript, one.reference, sep="\t", file=file)


def _score(name: str, train_recordings: int, pairs: list[tuple[str, str]], majority: str, is_group: bool) -> VoiceScore:
    transcripts, references = zip(*pairs, strict=True)
    return VoiceScore(
        name,
        train_recordings,
        len(pairs),
        ErrorRates.of(transcripts, references),
        ErrorRates.of([majority] * len(references), references),
        is_group,
    )
