"""A file of batches, which our worker and a peer train on and are evaluated on. It needs NumPy alone, for the peers.

A row is one pair, without segments: `source` ids `[B, S]` end with eos; the decoder's `inputs` `[B, T]` begin with bos,
and its `labels` `[B, T]` end with eos. All are int32, and 0 is padding, to the right of a row.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

FIELDS = ("source", "inputs", "labels")
SPLITS = ("train", "held_out")
Rows = dict[str, np.ndarray]


class Batches:
    """The batches of a file.

    Attributes:
      digest: the SHA-256 of the file, by which two workers show that they have read the same one.
    """

    def __init__(self, path: str | pathlib.Path):
        """Reads a file of `write`."""
        self.digest = hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()
        with np.load(path) as arrays:
            self._arrays = dict(arrays)

    def of(self, split: str) -> Iterator[Rows]:
        """Yields the batches of a split, each with the arrays of `FIELDS`."""
        for index in range(len(self._arrays[f"{split}/labels"])):
            yield {field: self._arrays[f"{split}/{field}"][index] for field in FIELDS}

    def target_tokens(self, split: str) -> list[int]:
        """Returns the number of predicted tokens, eos included, of each batch of a split."""
        return np.count_nonzero(self._arrays[f"{split}/labels"], axis=(1, 2)).tolist()

    @property
    def longest(self) -> int:
        """The length of the longer side of a row, in tokens."""
        return max(self._arrays[f"train/{field}"].shape[-1] for field in FIELDS)


def write(path: pathlib.Path, splits: Mapping[str, Sequence[Rows]]):
    """Writes the batches of both `SPLITS`; the batches of a split have one shape, and there is at least one."""
    arrays = {
        f"{split}/{field}": np.stack([batch[field] for batch in batches])
        for split, batches in splits.items()
        for field in FIELDS
    }
    partial = path.with_suffix(".partial")
    with open(partial, "wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
    os.replace(partial, path)
