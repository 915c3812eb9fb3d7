"""Speech corpora: recordings and their transcripts, as rows of features and labels.

A speech corpus is a corpus (`data.corpus`) whose languages are voices, such as `en_f3`, and whose pairs are
(reference to a recording, transcript). Beside SPLIT/VOICE.tsv is SPLIT/VOICE.pcm, the voice's recordings one after
another, 16-bit samples of little endian; a reference is `SPLIT/VOICE START COUNT`, in samples. `tools.build_speech`
and `tools.import_speech` write it. A voice without training pairs is a held-out voice.

A batch is

    {"source": {"features" [B, S, F] float32, "segment_ids" [B, S] int32},
     "target": {"labels", "segment_ids"}, each [B, T] int32}

A row is one recording: segment 1, and 0 for padding. Labels have no eos; CTC needs none.
"""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lingvo_moe.data import languages
from lingvo_moe.data.batching import ArrayRows, Example, InputConfig, Readers
from lingvo_moe.data.corpus import MANIFEST, SPLITS, read_manifest
from lingvo_moe.data.log_mel import LogMel
from lingvo_moe.data.tokenizer import Tokenizer, Tokenizers
from lingvo_moe.errors import UserError
from lingvo_moe.lazy import tf
from lingvo_moe.sharding.layout import Spec
from lingvo_moe.utils.hashes import sha256
from lingvo_moe.utils.subsampling import SUBSAMPLING

ENCODING = np.dtype("<i2")
AUDIO_SUFFIX = ".pcm"
_FULL_SCALE = 2.0**15
_REFERENCE = re.compile(r"([^/ ]+)/([^/ ]+) ([0-9]+) ([0-9]+)")
_REBUILD = (
    "Build the corpus again, with --force: python -m tools.build_speech, or tools.import_speech for recordings of your "
    "own."
)


@dataclasses.dataclass(frozen=True)
class SpeechInput(InputConfig):
    """The shape and the content of batches of recordings; see `InputConfig` for the other fields.

    Attributes:
      source_length: S, the frames of a row, a multiple of 4. A row is one recording.
      target_length: T, the labels of a row.
      packing: false; recordings do not share a row.
      features: what a frame holds.
    """

    source_length: int = 400
    packing: bool = False
    lookahead: int = 1
    features: LogMel = LogMel()

    def __post_init__(self):
        super().__post_init__()
        if not self.source_length or self.source_length % SUBSAMPLING:
            raise UserError(
                f"input.source_length is {self.source_length}; the frames of a row are a multiple of {SUBSAMPLING}."
            )
        if self.name_substitution:
            raise UserError("input.name_substitution is for pairs of texts, which recordings are not; leave it out.")
        for side in ("source", "target"):
            if language := getattr(self, f"{side}_language"):
                raise UserError(f"input.{side}_language is {language!r}, but recordings have none; leave it out.")
        if self.packing:
            raise UserError("input.packing is true, but a row is one recording; leave it out.")

    @property
    def model_fields(self) -> dict[str, int]:
        """See `BatchConfig`."""
        return {"num_bins": self.features.num_bins}

    def specs(self) -> dict[str, dict[str, Spec]]:
        """See `InputConfig`."""
        frames, labels = (self.batch_size, self.source_length), (self.batch_size, self.target_length)
        features = Spec((*frames, self.features.num_bins), "float32", "BSm")
        return {
            "source": {"features": features, "segment_ids": Spec(frames, "int32", "BS")},
            "target": dict.fromkeys(("labels", "segment_ids"), Spec(labels, "int32", "BT")),
        }

    def fits(self, example: Example) -> bool:
        """Returns whether a recording fits into a row, and its labels, which take a position each, into its frames."""
        frames, labels = len(example.source), example.target
        # Between two equal labels CTC needs a blank.
        needed = len(labels) + int(np.count_nonzero(labels[1:] == labels[:-1]))
        return (
            0 < frames <= self.source_length
            and 0 < len(labels) <= self.target_length
            and needed <= -(-frames // SUBSAMPLING)
        )

    def empty_rows(self, count: int) -> RecordingRows:
        """See `InputConfig`."""
        return RecordingRows(self, count)

    def open_readers(self, corpus: str | Path, tokenizers: str | Path) -> Readers:
        """See `InputConfig`; the source is recordings."""
        target = Tokenizers.load(tokenizers).target
        by_side = {"source": RecordingReader(Path(corpus), self.features), "target": target}
        return Readers(by_side, self._fingerprints(target))

    @property
    def languages(self) -> dict[str, str]:
        """See `InputConfig`; recordings and their transcripts have none."""
        return {}

    def fingerprints(self, tokenizers: str | Path) -> tuple[str, ...]:
        """See `InputConfig`."""
        return self._fingerprints(Tokenizers.load(tokenizers).target)

    def _fingerprints(self, target: Tokenizer) -> tuple[str, ...]:
        return repr(self.features), sha256(target.model)


class RecordingRows(ArrayRows):
    """A batch of recordings, one in a row; see `batching.ArrayRows`."""

    def write(self, row: int, example: Example):
        """See `ArrayRows`."""
        for side, name, values in (("source", "features", example.source), ("target", "labels", example.target)):
            self.batch[side][name][row, : len(values)] = values
            self.batch[side]["segment_ids"][row, : len(values)] = 1


class RecordingReader:
    """Reads the recordings of a corpus as features; the protocol `batching.Reader`."""

    def __init__(self, corpus: Path, features: LogMel):
        """Opens a corpus; raises UserError if recordings are missing, truncated or of another sample rate."""
        self._corpus, self._features = corpus, features
        manifest = read_manifest(corpus)
        audio = manifest.get("audio")
        if not isinstance(audio, dict):
            raise UserError(f"{corpus}: a corpus of texts, but the model reads recordings. {_REBUILD}")
        if audio.get("sample_rate") != features.sample_rate:
            raise UserError(
                f"{corpus}: recordings of {audio.get('sample_rate')} samples per second, but "
                f"input.features.sample_rate is {features.sample_rate}; pass --set with that of the corpus."
            )
        for name, size in manifest.get("files", {}).items():
            self._check_size(name, size)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the features of each reference, `[frames, F] float32`."""
        return [features_of(self.samples(text), self._features) for text in texts]

    def in_graph(self, call: Callable) -> Any:
        """Returns an object whose `tokenize` maps references `[N] string` to features, ragged `[N, (frames), F]`."""
        spec = tf.RaggedTensorSpec((None, self._features.num_bins), tf.float32, ragged_rank=0)

        def features(reference: tf.Tensor) -> tf.Tensor:
            samples = call(lambda text: _scaled(self.samples(text.decode())), reference, tf.float32)
            samples.set_shape([None])
            return self._features(samples)

        return types.SimpleNamespace(
            tokenize=lambda references: tf.map_fn(features, references, fn_output_signature=spec)
        )

    def samples(self, reference: str) -> np.ndarray:
        """Returns the samples of a reference, `[count] int16`; raises UserError where there is no such recording."""
        name, start, count = _parsed(reference)
        path = self._corpus / name
        try:
            total = path.stat().st_size // ENCODING.itemsize
            # Not mapped into memory: of a file that is truncated meanwhile, that would end the process by a signal.
            samples = np.fromfile(path, ENCODING, min(count, total), offset=min(start, total) * ENCODING.itemsize)
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}). {_REBUILD}") from None
        if len(samples) < count:
            raise UserError(f"{path}: {total} samples, but the corpus names {reference!r}. {_REBUILD}")
        return samples

    def _check_size(self, name: str, expected: int):
        path = self._corpus / name
        found = f"{path.stat().st_size} bytes" if path.is_file() else "missing"
        if found != f"{expected} bytes":
            raise UserError(f"{path}: {found}, but {MANIFEST} lists {expected} bytes. {_REBUILD}")


def features_of(samples: np.ndarray, features: LogMel) -> np.ndarray:
    """Returns the features of samples of 16 bits `[count]`, `[frames, F] float32`."""
    return features(tf.constant(_scaled(samples))).numpy()


def reference(split: str, voice: str, start: int, count: int) -> str:
    """Returns the reference to `count` samples from `start` of a voice's recordings."""
    return f"{split}/{voice} {start} {count}"


def _scaled(samples: np.ndarray) -> np.ndarray:
    """Returns samples of 16 bits as float32 in [-1, 1)."""
    return samples.astype(np.float32) / np.float32(_FULL_SCALE)


def _parsed(text: str) -> tuple[str, int, int]:
    """Returns (path below the corpus, first sample, number of samples); raises UserError for anything else."""
    if found := _REFERENCE.fullmatch(text):
        split, voice, start, count = found.groups()
        if split in SPLITS and int(count) > 0:
            return f"{split}/{languages.check_label(voice, text)}{AUDIO_SUFFIX}", int(start), int(count)
    raise UserError(f"{text!r} is not a reference to a recording, SPLIT/VOICE START COUNT. {_REBUILD}")
