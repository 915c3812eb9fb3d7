"""Builds a speech corpus: the sentences of a corpus of texts, spoken by eSpeak NG in many voices.

A sentence is spoken once, by one of the training voices. A test sentence is spoken by each held-out voice as well, so
held-out sentences are tested apart from held-out voices. Speed and pitch vary from recording to recording.
"""

from __future__ import annotations

import collections
import re
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lingvo_moe.data.corpora import recordings_manifest, splitting
from lingvo_moe.data.corpora.corpus_writer import OutputDirectory, Writer, prepare_output_directory
from lingvo_moe.data.corpora.espeak import Espeak
from lingvo_moe.data.corpus import SPLITS, Corpus
from lingvo_moe.data.speech import AUDIO_SUFFIX, ENCODING, reference
from lingvo_moe.errors import UserError, did_you_mean
from lingvo_moe.utils import progress

# Variants of eSpeak NG's voices: women, men and characters.
TRAINING_VOICES = ("f1", "f2", "f3", "f4", "m1", "m2", "m3", "m4", "m6", "m7")
HELD_OUT_VOICES = ("f5", "m5", "m8")
# eSpeak NG's name of a language, where it is not the corpus's label with a hyphen.
_NAMES = {"en": "en-us", "zh_Hans": "cmn"}
_RULES_VERSION = 1  # a part of a corpus's identity: increase it with every change of these rules
_SILENT = re.compile(r"[.,!?;:\"“”()]")
_RATES, _PITCHES = (150, 200), (35, 65)


class Recording(NamedTuple):
    """What is to be spoken: a transcript, by a variant of the voice of a language."""

    split: str
    language: str
    variant: str
    transcript: str

    @property
    def voice(self) -> str:
        """The corpus's label."""
        return f"{self.language}_{self.variant}"

    def synthesize(self, espeak: Espeak) -> np.ndarray:
        """Returns its samples, at a speed and pitch that depend on the recording alone."""
        draws = (splitting.hash_fraction(f"{part}\t{self.voice}\t{self.transcript}") for part in ("rate", "pitch"))
        rate, pitch = (round(low + draw * (high - low)) for draw, (low, high) in zip(draws, (_RATES, _PITCHES)))
        name = _NAMES.get(self.language, self.language.lower().replace("_", "-"))
        return espeak.synthesize(self.transcript, f"{name}+{self.variant}", rate, pitch)


def build(
    texts: Corpus, output: str | Path, languages: Sequence[str] = ("en",), max_characters: int = 48, force: bool = False
) -> tuple[Corpus, bool]:
    """Speaks the sentences of a corpus, unless `output` already has the recordings.

    Args:
      texts: its splits are those of the recordings.
      output: the directory to make.
      languages: whose sentences to speak: `en`, the targets of all pairs, or languages of the corpus.
      max_characters: the length of the longest transcript; longer sentences are left out.
      force: whether to replace a corpus of other sentences.

    Returns:
      The corpus, and whether this call built it.

    Raises:
      UserError: the corpus has no such language, no sentence of one can be spoken, or `output` has something else.
    """
    output = Path(output).absolute()
    prepare_output_directory(output)
    settings = (_RULES_VERSION, texts.fingerprint, tuple(languages), max_characters, TRAINING_VOICES, HELD_OUT_VOICES)
    target = OutputDirectory(output, f"speech {settings}")
    if not force and target.is_up_to_date():
        return Corpus.open(output), False
    target.check_replaceable(force)
    recordings = _all_recordings(texts, languages, max_characters)
    espeak = Espeak()
    with target.atomic_writer(force) as writer:
        _write(writer, recordings, espeak)
        writer.finish(_facts(texts, target, recordings, espeak.sample_rate))
    return Corpus.open(output), True


def transcript_of(sentence: str) -> str | None:
    """Returns a sentence in lower case without punctuation; None if it has something that is spoken otherwise.

    A digit, a sign or a capital within a word (an abbreviation) is spoken as words that are not written.
    """
    words = _SILENT.sub(" ", unicodedata.normalize("NFC", sentence)).replace("’", "'").split()
    if not words or any(not word.replace("'", "").replace("-", "").isalpha() for word in words):
        return None
    if any(not word[1:].islower() and len(word) > 1 for word in words):
        return None
    return " ".join(words).replace("-", " ").lower()


def _all_recordings(texts: Corpus, languages: Sequence[str], max_characters: int) -> list[Recording]:
    """Returns what to record; raises UserError for a language without a recording."""
    recordings, preset = [], texts.manifest["preset"]
    for language in languages:
        if language not in ("en", *texts.languages):
            raise UserError(
                f"--languages={language}: --preset={preset} has no sentences in it; it has en, "
                f"{', '.join(texts.languages)}.{did_you_mean(language, texts.languages)}"
            )
        own = list(_recordings(texts, language, max_characters))
        if not own:
            raise UserError(
                f"--languages={language}: no sentence of --preset={preset} can be spoken as it is written, in one of "
                f"at most --max_characters={max_characters}; raise these, or leave the language out."
            )
        recordings += own
    return recordings


def _recordings(texts: Corpus, language: str, max_characters: int) -> Iterator[Recording]:
    """Yields what to record in a language, by split and voice, in an order that depends on the sentences alone."""
    seen: set[str] = set()
    for split in reversed(SPLITS):  # a transcript that is held out is not trained on
        transcripts = sorted(_transcripts(texts, split, language, max_characters) - seen)
        seen.update(transcripts)
        for transcript in transcripts:
            draw = splitting.hash_fraction(f"voice\t{transcript}")
            yield Recording(split, language, TRAINING_VOICES[int(draw * len(TRAINING_VOICES))], transcript)
        if split == "test":
            for variant in HELD_OUT_VOICES:
                yield from (Recording(split, language, variant, transcript) for transcript in transcripts)


def _transcripts(texts: Corpus, split: str, language: str, max_characters: int) -> set[str]:
    if language == "en":
        pairs = (pair for other in texts.languages_of(split) for pair in texts.pairs(split, other))
        sentences = {english for _, english in pairs}
    elif language in texts.languages_of(split):
        sentences = {source for source, _ in texts.pairs(split, language)}
    else:
        sentences = set()
    found = {transcript_of(sentence) for sentence in sentences}
    return {transcript for transcript in found if transcript and len(transcript) <= max_characters}


def _write(writer: Writer, recordings: Sequence[Recording], espeak: Espeak):
    by_voice: dict[str, list[Recording]] = collections.defaultdict(list)
    for recording in recordings:
        by_voice[recording.voice].append(recording)
    with progress.bar("speaking", len(recordings), "sentences") as advance:
        for voice in sorted(by_voice):
            pairs: dict[str, list[tuple[str, str]]] = {split: [] for split in SPLITS}
            samples: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
            ends: dict[str, int] = dict.fromkeys(SPLITS, 0)
            for recording in by_voice[voice]:
                spoken, split = recording.synthesize(espeak), recording.split
                pairs[split].append((reference(split, voice, ends[split], len(spoken)), recording.transcript))
                samples[split].append(spoken)
                ends[split] += len(spoken)
                advance()
            for split, parts in samples.items():
                if parts:
                    writer.add_file(f"{split}/{voice}{AUDIO_SUFFIX}", np.concatenate(parts).astype(ENCODING).tobytes())
            writer.add(voice, pairs, len(by_voice[voice]), collections.Counter())


def _facts(texts: Corpus, target: OutputDirectory, recordings: Sequence[Recording], sample_rate: int) -> dict:
    """The manifest's facts beside the voices."""
    transcripts = {split: {r.transcript for r in recordings if r.split == split} for split in SPLITS}
    return {
        "preset": texts.manifest["preset"],
        "inputs": texts.manifest["inputs"],
        **recordings_manifest.facts(target, sample_rate, transcripts),
    }
