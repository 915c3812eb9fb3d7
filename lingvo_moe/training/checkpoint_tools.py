"""Operations on checkpoints besides training: choose, inspect, verify, and write new ones."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import pathlib
from collections.abc import Iterator

import numpy as np

from lingvo_moe.errors import UserError
from lingvo_moe.training import checkpoint_arrays, checkpoint_manifest, disk_errors, logdir_lock
from lingvo_moe.training.checkpoint import Checkpoints, summary
from lingvo_moe.training.checkpoint_errors import (
    CorruptCheckpoint,
    UnreadableCheckpoint,
    check_read_failure,
    check_there,
)
from lingvo_moe.training.checkpoint_reader import ARRAYS, Reader


@dataclasses.dataclass(frozen=True)
class Overview:
    """A checkpoint at a glance.

    Attributes:
      step: the training step.
      bytes: the size of its files; None if that cannot be read.
      problem: what is wrong as far as sizes and metadata show; empty for a valid checkpoint.
      model, weights, date: the registered name, the number of weights, when it was complete; None if that cannot be
        read.
      origin: where the weights come from, in a checkpoint of weights only; None for one that training wrote.
    """

    step: int
    bytes: int | None
    problem: str
    model: str | None = None
    weights: int | None = None
    date: datetime.datetime | None = None
    origin: str | None = None


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Statistics of the finite values of an array, in float64; NaN if there is none.

    Attributes:
      mean, rms, least, greatest: of the finite values.
      not_finite: the number of other values.
    """

    mean: float
    rms: float
    least: float
    greatest: float
    not_finite: int

    @staticmethod
    def of(array: np.ndarray) -> Statistics:
        """Returns the statistics of an array of numbers."""
        values = array[np.isfinite(array)].astype(np.float64)
        not_finite = array.size - values.size
        if not values.size:
            return Statistics(np.nan, np.nan, np.nan, np.nan, not_finite)
        return Statistics(
            float(values.mean()),
            float(np.sqrt(np.mean(values**2))),
            float(values.min()),
            float(values.max()),
            not_finite,
        )


def overview(checkpoints: Checkpoints, step: int) -> Overview:
    """Returns what sizes and metadata show; reads no array. Raises RemovedCheckpoint if it is removed meanwhile."""
    try:
        return _overview(checkpoints.path(step), step)
    except UnreadableCheckpoint as error:
        return Overview(step, None, f"cannot be read ({error.why})")


def _overview(directory: pathlib.Path, step: int) -> Overview:
    found = checkpoint_manifest.problems(directory, hashes=False)
    problem = f"no {checkpoint_manifest.MANIFEST}" if found is None else summary(found) if found else ""
    try:
        size = checkpoint_manifest.size(directory)
    except OSError as error:
        check_there(directory)
        check_read_failure(directory, error)
        raise
    try:
        reader = Reader(directory)
        meta, date = reader.meta, reader.date()
    except CorruptCheckpoint as error:
        return Overview(step, size, problem or str(error))
    weights = sum(int(np.prod(shape)) for shape in meta["weights"].values())
    return Overview(step, size, problem, meta["model"], weights, date, meta.get("origin"))


def verify(checkpoints: Checkpoints, step: int) -> list[str]:
    """Compares every file with the manifest and reads every array, whose checksums are verified.

    Returns:
      One line for each file or array that is corrupt, missing or not finite; empty for a valid checkpoint.

    Raises:
      RemovedCheckpoint: it was removed meanwhile.
      UnreadableCheckpoint: it cannot be read for a reason that may pass.
    """
    directory = checkpoints.path(step)
    reader = Reader(directory)
    found = checkpoint_manifest.problems(directory) or []
    found += reader.problems(finite=True)
    if not found and (manifest := checkpoint_manifest.load(directory)) and manifest.arrays != len(reader.specs()):
        found.append(f"there are {len(reader.specs())} arrays instead of {manifest.arrays}")
    return found


def choose(checkpoints: Checkpoints, step: int | None, items: tuple[str, ...] | None = None) -> int:
    """Returns `step`, or the newest valid one for None; raises UserError if it is absent or corrupt."""
    step = checkpoints.latest(items) if step is None else step
    if step not in checkpoints.steps():
        there = ", ".join(map(str, checkpoints.steps())) or "none"
        raise UserError(
            f"{checkpoints.directory}: there is no checkpoint{'' if step is None else f' of step {step}'}. Existing "
            f"steps: {there}."
        )
    if found := checkpoints.problems(step, items):
        check_there(checkpoints.path(step))
        raise UserError(f"{checkpoints.path(step)} is corrupt: {summary(found)}. Choose another step.")
    return step


def read_finite(reader: Reader, path: str) -> np.ndarray:
    """Returns the weight with this path, as `read_weight`; raises UserError if it is not finite."""
    weight = read_weight(reader, path)
    checkpoint_arrays.check_finite({path: weight}, f"{reader.directory}", "choose another step")
    return weight


def read_weight(reader: Reader, path: str) -> np.ndarray:
    """Returns the weight with this path; raises UserError if it is corrupt."""
    try:
        return reader.read(ARRAYS["theta"] + path)
    except CorruptCheckpoint as error:
        raise UserError(f"{reader.directory} is corrupt: {error}. Choose another step.") from None


@contextlib.contextmanager
def new_checkpoints(logdir: str | pathlib.Path, flag: str) -> Iterator[Checkpoints]:
    """Yields the checkpoints of a new log directory, in which nothing else saves meanwhile, and closes them.

    Raises:
      UserError: there are checkpoints in it, or a training, or nothing can be written there.
    """
    path = pathlib.Path(logdir).absolute()
    disk_errors.require_directory(f"{flag}={logdir}", path, flag)
    with logdir_lock.locked(path, flag), contextlib.closing(Checkpoints(path, keep=1)) as checkpoints:
        check_new(logdir, flag)
        yield checkpoints


def check_new(logdir: str | pathlib.Path, flag: str):
    """Raises UserError if there are checkpoints in a log directory, or nothing can be written to it; makes nothing."""
    path = pathlib.Path(logdir).absolute()
    there = next(each for each in (path, *path.parents) if each.exists())
    if not there.is_dir():
        raise UserError(f"{flag}={logdir}: {there} is a file; expected a directory, or a name for a new one.")
    disk_errors.require_directory(f"{flag}={logdir}", there, flag)
    if Checkpoints(logdir).steps():  # not what a write that failed has left, which the next one removes
        raise UserError(f"{flag}={logdir} already has checkpoints; name a new directory.")
