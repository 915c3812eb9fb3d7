"""Generates a tiny speech corpus: each letter is a tone, so tests need no synthesiser."""

from __future__ import annotations

import pathlib
from collections import Counter

import numpy as np

from lingvo_moe.data.corpora.corpus_writer import Writer
from lingvo_moe.data.corpus import SPLITS
from lingvo_moe.data.speech import AUDIO_SUFFIX, ENCODING, reference

SAMPLE_RATE = 8000
_LETTER_SECONDS = 0.12
WORDS = ("ab", "cab", "bad", "dab", "cad", "abba", "dad", "add")


def tone_of(letter: str, pitch: float) -> np.ndarray:
    """Returns the samples of a letter, `[count] int16`; a space is silent."""
    times = np.arange(round(_LETTER_SECONDS * SAMPLE_RATE)) / SAMPLE_RATE
    hertz = 300.0 * pitch * (1 + "abcd".find(letter))
    return (8000 * np.sin(2 * np.pi * hertz * times) * (letter != " ")).astype(np.int16)


def write_recordings(directory: pathlib.Path, sentences: int = 40) -> pathlib.Path:
    """Writes a corpus of two training voices and a held-out one; returns `directory`, which must not exist."""
    directory.mkdir(parents=True)
    writer, random = Writer(directory), np.random.default_rng(0)
    for voice, pitch, splits in (("en_a", 1.0, SPLITS), ("en_b", 1.1, SPLITS), ("en_c", 1.2, ("test",))):
        pairs: dict[str, list[tuple[str, str]]] = {split: [] for split in SPLITS}
        for split in splits:
            samples = np.zeros(0, np.int16)
            for _ in range(sentences if split == "train" else 4):
                transcript = " ".join(random.choice(WORDS, random.integers(1, 4)))
                spoken = np.concatenate([tone_of(letter, pitch) for letter in transcript])
                pairs[split].append((reference(split, voice, len(samples), len(spoken)), transcript))
                samples = np.concatenate([samples, spoken])
            writer.add_file(f"{split}/{voice}{AUDIO_SUFFIX}", samples.astype(ENCODING).tobytes())
        writer.add(voice, pairs, sum(map(len, pairs.values())), Counter())
    keys = dict.fromkeys(("all", "eligible", "test", "valid", "near_duplicates", "overlapping"), 0)
    none = {"english_labels": {}, "unlabelled": {}, "skipped_links": {}, "missing_packages": []}
    writer.finish({"preset": "none", "inputs": [], "english_keys": keys, "audio": {"sample_rate": SAMPLE_RATE}, **none})
    return directory
