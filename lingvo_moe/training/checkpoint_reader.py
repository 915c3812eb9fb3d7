"""What a checkpoint holds, array by array, on the host: no model, no mesh, and never more than one array in memory."""

from __future__ import annotations

import datetime
import functools
import math
import pathlib
import sys
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import jax
import numpy as np
from orbax import checkpoint as orbax

from lingvo_moe import tree
from lingvo_moe.sharding.layout import Spec
from lingvo_moe.training.checkpoint_manifest import LONG, CorruptCheckpoint
from lingvo_moe.utils import progress

Value = TypeVar("Value")
# The items of a step that hold arrays, and where those belong in the training state.
ARRAYS = {"theta": "theta/", "rest": ""}
WEIGHTS = ("theta", "meta")
_tell_of_unraisable = sys.unraisablehook


def _tell_of_others(unraisable: Any):
    """Of a read that fails Orbax leaves those beside it to threads, which then find that nobody waits for them."""
    if str(unraisable.exc_value) != "Event loop is closed":
        _tell_of_unraisable(unraisable)


sys.unraisablehook = _tell_of_others


class Reader:
    """One step's directory.

    Methods raise Damaged, which names the item or array, whatever is wrong with the files.
    """

    def __init__(self, directory: pathlib.Path):
        self.directory = directory

    @functools.cached_property
    def meta(self) -> dict[str, Any]:
        """`model`, `weights` (path to shape), `data_state`, and `origin` where it holds weights alone."""
        meta = _read("meta", lambda: _checkpointer(orbax.JsonCheckpointHandler()).restore(self.directory / "meta"))
        entries = meta.keys() if isinstance(meta, dict) else ()
        if not {"model", "weights", "data_state"}.issubset(entries) or not isinstance(meta["weights"], dict):
            raise CorruptCheckpoint("meta lacks an entry")
        return meta

    @property
    def items(self) -> tuple[str, ...]:
        """The items that it must have."""
        return WEIGHTS if "origin" in self.meta else (*ARRAYS, "meta")

    def specs(self, items: Collection[str] | None = None) -> dict[str, Spec]:
        """Shape and dtype of every array of these items (default: all there must be), by path in the training state."""
        found = {}
        for item in self.items if items is None else items:
            if item in ARRAYS:
                stored = _read(item, lambda: self._tree(item))
                found |= {
                    ARRAYS[item] + path: Spec(tuple(leaf.shape), np.dtype(leaf.dtype).name, "")
                    for path, leaf in tree.flatten(stored).items()
                }
        return found

    def read(self, path: str) -> np.ndarray:
        """The array of this path in the training state."""
        item = "theta" if path.startswith(ARRAYS["theta"]) else "rest"
        wanted = tree.unflatten({path.removeprefix(ARRAYS[item]): orbax.RestoreArgs(restore_type=np.ndarray)})
        arguments = orbax.args.PyTreeRestore(
            tree.map_leaves(lambda leaf: 0, wanted), restore_args=wanted, partial_restore=True
        )
        found = _read(
            path, lambda: _checkpointer(orbax.PyTreeCheckpointHandler()).restore(self.directory / item, args=arguments)
        )
        return np.asarray(tree.flatten(found)[path.removeprefix(ARRAYS[item])])

    def problems(self, items: Collection[str] | None = None, finite: bool = False) -> list[str]:
        """Reads all arrays of these items; returns what cannot be read, is missing or, if asked for, holds NaN or infinity."""
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

    def _tree(self, item: str) -> dict:
        metadata = orbax.Checkpointer(orbax.PyTreeCheckpointHandler()).metadata(self.directory / item).item_metadata
        if metadata is None:  # as Orbax answers whatever goes wrong
            raise ValueError("what it says of its arrays is damaged")
        return metadata.tree

    def _problem(self, path: str, finite: bool) -> str | None:
        try:
            array = self.read(path)
        except CorruptCheckpoint as error:
            return str(error)
        bad = np.count_nonzero(~np.isfinite(array)) if finite else 0
        return f"{path} has {bad} values that are not finite" if bad else None

    def date(self) -> datetime.datetime:
        """When it was complete."""

        def committed() -> datetime.datetime:
            metadata = orbax.Checkpointer(orbax.CompositeCheckpointHandler()).metadata(self.directory)
            # Of a damaged file Orbax gives what it could read, with None for the rest.
            return datetime.datetime.fromtimestamp(metadata.commit_timestamp_nsecs / 1e9, datetime.timezone.utc)

        return _read("the step's metadata", committed)


def num_bytes(spec: Spec) -> int:
    """Of an array with this shape and dtype."""
    return math.prod(spec.shape) * np.dtype(spec.dtype).itemsize


def _checkpointer(handler: orbax.CheckpointHandler) -> orbax.Checkpointer:
    """One that reads in this process and waits for no other."""
    alone = orbax.options.MultiprocessingOptions(
        primary_host=jax.process_index(), active_processes={jax.process_index()}
    )
    return orbax.Checkpointer(handler, multiprocessing_options=alone)


def _read(what: str, read: Callable[[], Value]) -> Value:
    try:
        return read()
    except Exception as error:  # Orbax raises whatever the damage led to, and the bare class, too
        raise CorruptCheckpoint(f"{what} cannot be read ({reason(error)})") from error


def reason(error: Exception) -> str:
    """An exception of a library's in a part of a line."""
    first_line = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first_line[:200]}"
