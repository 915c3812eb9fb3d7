"""Reads a checkpoint on the host, array by array, without a model or a mesh; one array is in memory at a time."""

from __future__ import annotations

import datetime
import functools
import math
import pathlib
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import jax
import numpy as np
from orbax import checkpoint as orbax

from lingvo_moe import tree
from lingvo_moe.data.batching import READERS_KEY
from lingvo_moe.errors import UserError, did_you_mean
from lingvo_moe.sharding.layout import Spec
from lingvo_moe.training.checkpoint_errors import (
    CorruptCheckpoint,
    UnreadableCheckpoint,
    check_there,
    is_read_failure,
    reason,
)
from lingvo_moe.training.checkpoint_manifest import LONG
from lingvo_moe.utils import progress

Value = TypeVar("Value")
# The items of a step that hold arrays, and the prefix of their paths in the training state.
ARRAYS = {"theta": "theta/", "rest": ""}
WEIGHTS = ("theta", "meta")


class Reader:
    """Reads one step.

    Every method raises CorruptCheckpoint, which names the item or array, if it cannot be read, RemovedCheckpoint if the
    directory is gone, or UnreadableCheckpoint for a reason that may pass, such as a missing permission.
    """

    def __init__(self, directory: str | pathlib.Path):
        """Takes the directory of a step; reads nothing yet."""
        self.directory = pathlib.Path(directory)

    @functools.cached_property
    def meta(self) -> dict[str, Any]:
        """`model`, `weights` (path to shape), `data_state`; of weights only, also `origin` and READERS_KEY."""
        meta = self._attempt(
            "meta", lambda: _checkpointer(orbax.JsonCheckpointHandler()).restore(self.directory / "meta")
        )
        if not _is_meta(meta):
            raise CorruptCheckpoint("meta lacks an entry, or has one of another kind")
        return meta

    @property
    def tokenizer_hashes(self) -> list[str] | None:
        """Hashes of the tokenizers that the weights were trained with, see `Readers.fingerprints`; None if unknown."""
        return (self.meta["data_state"] or self.meta).get(READERS_KEY)

    @property
    def items(self) -> tuple[str, ...]:
        """The items that the checkpoint must have."""
        return WEIGHTS if "origin" in self.meta else (*ARRAYS, "meta")

    def specs(self, items: Collection[str] | None = None) -> dict[str, Spec]:
        """Returns shape and dtype of each array of these items (default: `items`), by path in the training state."""
        found = {}
        for item in self.items if items is None else items:
            if item in ARRAYS:
                stored = self._attempt(item, lambda item=item: self._tree(item))
                found |= {
                    ARRAYS[item] + path: Spec(tuple(leaf.shape), np.dtype(leaf.dtype).name, "")
                    for path, leaf in tree.flatten(stored).items()
                }
        return found

    def read(self, path: str) -> np.ndarray:
        """Returns the array with this path in the training state; its checksums are verified.

        Raises:
          UserError: the step has no such array.
        """
        item = "theta" if path.startswith(ARRAYS["theta"]) else "rest"
        wanted = tree.unflatten({path.removeprefix(ARRAYS[item]): orbax.RestoreArgs(restore_type=np.ndarray)})
        arguments = orbax.args.PyTreeRestore(
            tree.map_leaves(lambda leaf: 0, wanted), restore_args=wanted, partial_restore=True
        )
        try:
            found = self._attempt(
                path,
                lambda: _checkpointer(orbax.PyTreeCheckpointHandler()).restore(self.directory / item, args=arguments),
            )
        except CorruptCheckpoint:
            self._check_has(path, item)  # a path that begins others, or goes on below an array
            raise
        (array,) = tree.flatten(found).values()
        if not isinstance(array, np.ndarray):  # Orbax leaves the 0 of `arguments` where there is no array
            self._check_has(path, item)
        return array

    def problems(self, items: Collection[str] | None = None, finite: bool = False) -> list[str]:
        """Reads all arrays of these items.

        Args:
          items: the items to read; None for all that there must be.
          finite: whether NaN and infinity count as problems.

        Returns:
          One line for each array that cannot be read, is missing, has another shape or is not finite.
        """
        try:
            items, weights = self.items if items is None else items, self.meta["weights"]
        except CorruptCheckpoint as error:
            return [str(error)]
        specs, found = {}, []
        for item in items:
            try:
                specs |= self.specs([item])
            except CorruptCheckpoint as error:
                found.append(str(error))
        if not found:
            stored = {path: list(spec.shape) for path, spec in specs.items()}
            found = [
                f"theta/{path} is {stored.get(f'theta/{path}', 'absent')} instead of {shape}"
                for path, shape in weights.items()
                if stored.get(f"theta/{path}") != shape
            ]
        size = sum(map(num_bytes, specs.values()))
        paths = (
            progress.track(specs, f"reading checkpoint {self.directory.name}", unit="arrays") if size >= LONG else specs
        )
        return found + [problem for path in paths if (problem := self._problem(path, finite))]

    def _check_has(self, path: str, item: str):
        """Raises UserError unless an item has an array with this path."""
        if path not in (known := self.specs([item])):
            raise UserError(f"{self.directory} has no {path}.{did_you_mean(path, known)}")

    def _tree(self, item: str) -> dict:
        metadata = orbax.Checkpointer(orbax.PyTreeCheckpointHandler()).metadata(self.directory / item).item_metadata
        if metadata is None:  # what Orbax returns, whatever goes wrong
            raise ValueError("its array metadata is corrupt")
        return metadata.tree

    def _problem(self, path: str, finite: bool) -> str | None:
        try:
            array = self.read(path)
        except CorruptCheckpoint as error:
            return str(error)
        bad = np.count_nonzero(~np.isfinite(array)) if finite else 0
        return f"{path} has {bad} values that are not finite" if bad else None

    def date(self) -> datetime.datetime:
        """Returns when the checkpoint was complete."""

        def committed() -> datetime.datetime:
            metadata = orbax.Checkpointer(orbax.CompositeCheckpointHandler()).metadata(self.directory)
            nanoseconds = metadata.commit_timestamp_nsecs
            if nanoseconds is None:  # what Orbax returns for what it could not read
                raise ValueError("there is no commit time")
            return datetime.datetime.fromtimestamp(nanoseconds / 1e9, datetime.UTC)

        return self._attempt("the step's metadata", committed)

    def _attempt(self, what: str, read: Callable[[], Value]) -> Value:
        try:
            return read()
        except Exception as error:  # Orbax raises many kinds, the bare class among them
            check_there(self.directory)
            if is_read_failure(error):
                raise UnreadableCheckpoint(self.directory, f"{what}: {reason(error)}") from error
            raise CorruptCheckpoint(f"{what} cannot be read ({reason(error)})") from error


def num_bytes(spec: Spec) -> int:
    """Returns the bytes of an array with this shape and dtype."""
    return math.prod(spec.shape) * np.dtype(spec.dtype).itemsize


def this_process() -> orbax.options.MultiprocessingOptions:
    """Returns the option that has Orbax read in this process, and wait for no other one."""
    return orbax.options.MultiprocessingOptions(
        primary_host=jax.process_index(), active_processes={jax.process_index()}
    )


def _is_meta(found: Any) -> bool:
    """Returns whether JSON can be the `meta` of a checkpoint."""
    if not isinstance(found, dict) or not {"model", "weights", "data_state"}.issubset(found):
        return False
    return (
        isinstance(found["model"], str)
        and isinstance(found["weights"], dict)
        and all(map(_is_shape, found["weights"].values()))
        and isinstance(found["data_state"], dict | None)
        and isinstance(found.get("origin", ""), str)
        and isinstance(found.get(READERS_KEY, []), list)
    )


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _checkpointer(handler: orbax.CheckpointHandler) -> orbax.Checkpointer:
    return orbax.Checkpointer(handler, multiprocessing_options=this_process())
