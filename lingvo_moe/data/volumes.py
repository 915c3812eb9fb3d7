"""Volumes to segment, made by a program: ellipsoids and tubes in noise, and the label of each voxel.

A volume is a pure function of (seed, split, n), so there is no corpus on disk. Objects of both kinds have the same
intensities: what distinguishes them is their shape. A batch is

    {"source": {"voxels" [B, X, Y, Z, 1] float32},
     "target": {"labels" [B, X, Y, Z] int32, "segment_ids" [B] int32}}

Segment 1 is a volume, 0 an empty row.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import numpy as np

from lingvo_moe import ranges
from lingvo_moe.data.batching import ArrayRows, BatchConfig, Example
from lingvo_moe.data.corpus import SPLITS
from lingvo_moe.errors import UserError
from lingvo_moe.ranges import COUNT, Range
from lingvo_moe.sharding.layout import Spec

CLASSES = ("background", "ellipsoid", "tube")  # by label
CHANNELS = 1
INTENSITIES = (0.5, 1.0)  # of objects; that of the background is 0
_SMALLEST = 8  # voxels along a side
_VERSION = 1  # of the generator: with another one, volume n is another volume
_OBJECTS = {"ellipsoid": (1, 3), "tube": (1, 3)}  # fewest and most of a volume
# In parts of the volume's shortest side.
_SEMI_AXES, _TUBE_RADII = (0.1, 0.25), (0.04, 0.08)


@dataclasses.dataclass(frozen=True)
class VolumeInput(BatchConfig):
    """The shape and the content of batches of volumes.

    Attributes:
      batch_size: B, the volumes of a batch over all processes.
      size: X, Y and Z, in voxels.
      noise: the standard deviation of the noise that is added to each voxel.
      held_out: the number of volumes of the splits valid and test, each.
      seed: of all volumes.
      shards: see `InputConfig`.

    Raises:
      UserError: a value that gives no batch.
    """

    batch_size: int = 2
    size: tuple[int, ...] = (32, 32, 32)
    noise: float = 0.4
    held_out: int = 32
    seed: int = 0
    shards: int = 8

    lookahead = 1  # every volume fits into the next row

    def __post_init__(self):
        if len(self.size) != 3 or min(self.size) < _SMALLEST:
            raise UserError(f"input.size is {self.size}; give three numbers from {_SMALLEST}, as 32,32,32.")
        counts = dict.fromkeys(("batch_size", "held_out", "shards"), COUNT)
        ranges.check("input.", self, {**counts, "noise": Range(), "seed": Range(0, 2**32 - 1)})

    @property
    def lengths(self) -> dict[str, int]:
        """See `BatchConfig`: the voxels of a volume, each with a label."""
        return dict.fromkeys(("source", "target"), math.prod(self.size))

    @property
    def model_fields(self) -> dict[str, int]:
        """See `BatchConfig`."""
        return {"channels": CHANNELS, "classes": len(CLASSES)}

    def specs(self) -> dict[str, dict[str, Spec]]:
        """See `BatchConfig`."""
        shape = (self.batch_size, *self.size)
        target = {"labels": Spec(shape, "int32", "BXYZ"), "segment_ids": Spec((self.batch_size,), "int32", "B")}
        return {"source": {"voxels": Spec((*shape, CHANNELS), "float32", "BXYZi")}, "target": target}

    def fits(self, example: Example) -> bool:
        """See `BatchConfig`: every volume does."""
        del example
        return True

    def empty_rows(self, count: int) -> VolumeRows:
        """See `BatchConfig`."""
        return VolumeRows(self, count)


class VolumeRows(ArrayRows):
    """A batch of volumes, one in a row; see `batching.ArrayRows`."""

    def write(self, row: int, example: Example):
        """See `ArrayRows`."""
        self.batch["source"]["voxels"][row] = example.source
        self.batch["target"]["labels"][row] = example.target
        self.batch["target"]["segment_ids"][row] = 1


class TrainVolumes:
    """The training volumes; the protocol `pipeline.Stream`.

    Attributes:
      identity: what decides which volume is example n.
      reader_fingerprints: none, as a volume has no text.
    """

    reader_fingerprints = ()

    def __init__(self, config: VolumeInput):
        self._config = config
        self.identity = ("volumes", _VERSION, config.size, float(config.noise), config.seed)

    def examples(self, first: int, step: int) -> Iterator[Example]:
        """Yields the volumes first, first + step, ... endlessly."""
        return (make_volume(self._config, "train", n) for n in itertools.count(first, step))

    def examples_at(self, indices: np.ndarray) -> Iterator[Example]:
        """Yields the volumes of these numbers."""
        return (make_volume(self._config, "train", n) for n in indices.tolist())


class HeldOutVolumes:
    """The volumes of a held-out split; the protocol `pipeline.HeldOut`."""

    def __init__(self, config: VolumeInput, split: str, max_volumes: int | None = None):
        """Takes at most `max_volumes` of the split's `config.held_out`."""
        self._config, self._split = config, split
        self._count = config.held_out if max_volumes is None else min(max_volumes, config.held_out)

    def examples(self, shuffled: bool = False) -> Iterator[Example]:
        """Yields the volumes. Raises ValueError if `shuffled`: labels of another volume measure nothing."""
        if shuffled:
            raise ValueError("volumes are not shuffled: the labels of another volume measure nothing")
        return (make_volume(self._config, self._split, n) for n in range(self._count))


def make_volume(config: VolumeInput, split: str, number: int) -> Example:
    """Returns volume `number` of a split: voxels `[X, Y, Z, 1] float32` and labels `[X, Y, Z] int32`.

    Tubes are drawn over ellipsoids. Equal seeds, splits and numbers give equal volumes, bit by bit on one machine: the
    LAPACK of another one may round the axes of an ellipsoid in another way, and its C library the noise.
    """
    # RandomState's streams are frozen; those of Generator may change with a version of NumPy.
    words = [config.seed, SPLITS.index(split), *divmod(number, 2**32)]
    random = np.random.RandomState(np.array(words, np.uint32))
    labels, voxels = np.zeros(config.size, np.int32), np.zeros(config.size, np.float32)
    for label, kind in enumerate(CLASSES[1:], start=1):
        for _ in range(random.randint(_OBJECTS[kind][0], _OBJECTS[kind][1] + 1)):
            box, inside = _DRAW[kind](config.size, random)
            labels[box][inside], voxels[box][inside] = label, random.uniform(*INTENSITIES)
    noise = config.noise * random.standard_normal(config.size)
    return Example(number, (voxels + noise.astype(np.float32))[..., None], labels)


def _ellipsoid(size: tuple[int, ...], random: np.random.RandomState) -> tuple[tuple[slice, ...], np.ndarray]:
    """Returns a box around a random ellipsoid, turned by any angle, and which voxels of the box are in it."""
    semi_axes = random.uniform(*_SEMI_AXES, 3) * min(size)
    centre = random.uniform(0.2, 0.8, 3) * size
    axes, _ = np.linalg.qr(random.standard_normal((3, 3)))
    reach = np.sqrt(np.square(axes * semi_axes).sum(-1))
    box = _box(centre - reach, centre + reach, size)
    x, y, z = _offsets(box, centre)
    a, b, c = (np.square((x * u + y * v + z * w) / length) for (u, v, w), length in zip(axes.T, semi_axes))
    return box, a + b + c <= 1


def _tube(size: tuple[int, ...], random: np.random.RandomState) -> tuple[tuple[slice, ...], np.ndarray]:
    """Returns a box around a random curve, a quadratic Bezier curve, and which voxels of the box are near the curve."""
    radius = max(random.uniform(*_TUBE_RADII) * min(size), 1.0)
    start, middle, end = random.uniform(0.0, 1.0, (3, 3)) * size
    t = np.linspace(0, 1, 2 * max(size))[:, None]
    points = (1 - t) ** 2 * start + 2 * t * (1 - t) * middle + t**2 * end
    inside = np.zeros(size, bool)
    for point in points:
        near = _box(point - radius, point + radius, size)
        x, y, z = map(np.square, _offsets(near, point))
        inside[near] |= x + y + z <= radius**2
    box = _box(points.min(0) - radius, points.max(0) + radius, size)
    return box, inside[box]


def _box(low: np.ndarray, high: np.ndarray, size: tuple[int, ...]) -> tuple[slice, ...]:
    """Returns the voxels of a volume from one corner to another, which may be outside of it."""
    first, last = np.maximum(np.floor(low), 0).astype(int), np.ceil(high).astype(int)
    return tuple(slice(start, min(stop + 1, most)) for start, stop, most in zip(first, last, size))


def _offsets(box: tuple[slice, ...], point: np.ndarray) -> list[np.ndarray]:
    """Returns how far the voxels of a box are from a point along each side: `[X, 1, 1]`, `[1, Y, 1]`, `[1, 1, Z]`."""
    return [indices - along for indices, along in zip(np.ogrid[box], point)]


_DRAW = {"ellipsoid": _ellipsoid, "tube": _tube}
