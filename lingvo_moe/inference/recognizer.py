"""Speech recognition with a trained model: error rates on the held-out recordings of a speech corpus, by voice."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Iterable, Sequence

import numpy as np

from lingvo_moe.data.batching import Example
from lingvo_moe.data.corpus import Corpus
from lingvo_moe.engines.base import Engine
from lingvo_moe.errors import UserError
from lingvo_moe.experiment import Experiment
from lingvo_moe.inference.error_rates import ErrorRates, majority_transcript
from lingvo_moe.inference.trained_weights import trained_weights
from lingvo_moe.layers.ctc import BLANK
from lingvo_moe.utils import progress


@dataclasses.dataclass(frozen=True)
class VoiceScore:
    """The error rates of one voice, or of several together.

    Attributes:
      voice: its label in the corpus, or what the voices have in common.
      train_recordings: 0 for a held-out voice.
      test_recordings: those that were scored.
      rates: of the model's transcripts.
      majority: of `majority_transcript`, the baseline that does not listen.
      is_group: whether it is of several together.
    """

    voice: str
    train_recordings: int
    test_recordings: int
    rates: ErrorRates
    majority: ErrorRates
    is_group: bool = False


class Recognizer:
    """Transcribes recordings with the newest checkpoint of a log directory.

    Attributes:
      step: the training step of the checkpoint.
    """

    def __init__(self, name: str, experiment: Experiment, engine: Engine, logdir: str | pathlib.Path):
        """Compiles the program and restores the weights; the arguments are those of `translator.Translator`.

        Raises:
          UserError: no recordings, no tokenizer or one too large for the model, no checkpoint or one of another model.
        """
        self._input, self._tokenizer = experiment.texts, experiment.open_tokenizers().target
        self._readers = self._input.open_readers(experiment.corpus, experiment.tokenizers).by_side
        with trained_weights(name, experiment, logdir) as restore:
            self._program = engine.load(experiment.steps.transcribe(self._input.specs()["source"]))
            self.step, self._theta = restore(self._program.shardings("theta"))

    def transcribe(self, recordings: Sequence[str]) -> list[str | None]:
        """Returns the transcript of each reference to a recording; None of one that does not fit into a row."""
        transcripts: list[str | None] = [None] * len(recordings)
        size = self._input.batch_size
        with progress.bar("transcribing", len(recordings), "recordings") as advance:
            for start in range(0, len(recordings), size):
                chunk = recordings[start : start + size]
                for index, transcript in self._transcribe_batch(chunk):
                    transcripts[start + index] = transcript
                advance(len(chunk))
        return transcripts

    def _transcribe_batch(self, recordings: Sequence[str]) -> list[tuple[int, str]]:
        """Returns (index, transcript) of those of at most `batch_size` recordings that fit into a row."""
        rows, fitting = self._input.empty_rows(self._input.batch_size), []
        for index, features in enumerate(self._readers["source"].encode(recordings)):
            if len(features) <= self._input.source_length:
                rows.add(Example(index, features, np.zeros(0, np.int32)))
                fitting.append(index)
        classes = np.asarray(self._program({"theta": self._theta, "source": rows.batch["source"]})["classes"])
        labels = [collapse(row) for row in classes[: len(fitting)]]
        return list(zip(fitting, self._tokenizer.decode(labels), strict=True))


def collapse(classes: Iterable[int]) -> list[int]:
    """Returns the labels that the classes of consecutive positions stand for: each run once, without blanks."""
    return [int(label) for label, _ in itertools.groupby(classes) if label != BLANK]


def evaluate(
    recognizer: Recognizer, corpus: Corpus, voices: Sequence[str] = (), max_pairs: int = 100, split: str = "test"
) -> tuple[list[VoiceScore], int]:
    """Transcribes up to `max_pairs` recordings of each voice and scores the transcripts.

    Args:
      recognizer: the model.
      corpus: whose `split` is transcribed.
      voices: which; all that have the split if empty.
      max_pairs: of each voice, see `Corpus.sample`.
      split: `test` or `valid`.

    Returns:
      (scores, the number of recordings left out because they do not fit into a row). The scores are of each voice, and
      of `trained voices` and `held-out voices` together, where there are any.

    Raises:
      UserError: as `Corpus.choose`, or no recording fits.
    """
    chosen = corpus.choose(split, voices)
    pairs = {voice: list(corpus.sample(split, voice, max_pairs)) for voice in chosen}
    transcripts = iter(recognizer.transcribe([recording for of_voice in pairs.values() for recording, _ in of_voice]))
    found = {voice: [(next(transcripts), reference) for _, reference in of_voice] for voice, of_voice in pairs.items()}
    scored = {voice: [(t, r) for t, r in of_voice if t is not None] for voice, of_voice in found.items()}
    left_out = sum(map(len, found.values())) - sum(map(len, scored.values()))
    if not any(scored.values()):
        raise UserError(
            f"none of the {left_out} {split} recordings fits input.source_length; raise it with --set "
            f"input.source_length=..."
        )
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
    return scores, left_out


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
