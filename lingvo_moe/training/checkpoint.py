"""Checkpoints: the training state and the place in the data, saved atomically by Orbax.

`LOGDIR/checkpoints/STEP/` holds three items: `theta` (the weights), `rest` (step, seed and the optimizer state) and `meta`
(the model's name, the shape of every weight, and the state of the input pipeline). Translation reads the first alone.
`manifest.json` beside them says what every file must be, see `integrity`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import errno
import itertools
import logging
import os
import pathlib
import re
import shutil
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from orbax import checkpoint as orbax

from lingvo_moe import tree
from lingvo_moe.distributed.process_group import ProcessGroup
from lingvo_moe.errors import UserError
from lingvo_moe.training import checkpoint_manifest, sharded_checkpoint
from lingvo_moe.training.checkpoint_reader import ARRAYS, WEIGHTS, Reader, reason

_ITEMS = (*ARRAYS, "meta")
# What a file system answers; TensorStore hands it on as a part of a longer message.
_REFUSALS = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS)))
# Orbax logs, with tracebacks, the errors that it raises as well.
logging.getLogger("absl").addFilter(lambda record: "orbax" not in pathlib.Path(record.pathname).parts)
# And leaves the writes beside the one that failed to the garbage collector, which has asyncio log theirs.
logging.getLogger("asyncio").addFilter(lambda record: "exception was never retrieved" not in record.getMessage())


@dataclasses.dataclass(frozen=True)
class Saved:
    """What a checkpoint gives back.

    Attributes:
      step: steps made.
      state: the training state, distributed as asked.
      data_state: of the input pipeline; None before the first batch.
    """

    step: int
    state: dict
    data_state: Any


class Checkpoints:
    """The checkpoints of one log directory.

    The newest sound one counts: a damaged one is named on standard error, and the one before takes its place. Of many
    processes each writes and reads what its devices hold; what is sound, and whatever else there is only one of, is the first
    one's to say.
    """

    def __init__(self, logdir: str | pathlib.Path, keep: int | None = None, processes: ProcessGroup = ProcessGroup()):
        """Opens `logdir/checkpoints`; nothing is created before the first save.

        Args:
          logdir: the log directory.
          keep: how many checkpoints stay as more are saved; None to read alone.
          processes: that have the arrays between them; all call the same methods in the same order.
        """
        self.processes = processes
        # Where it is told which processes there are, Orbax has them meet at JAX's service; otherwise by a program of its own on
        # all devices, from whichever thread, between training steps that the next process may begin in another order.
        everyone = set(range(processes.count)) if processes.count > 1 else None
        self._together = orbax.options.MultiprocessingOptions(active_processes=everyone)
        self.directory = pathlib.Path(logdir).absolute() / "checkpoints"
        self._keep = keep
        self._manager: orbax.CheckpointManager | None = None
        self._manifest_writer = concurrent.futures.ThreadPoolExecutor(1, "seal")
        self._pending_manifest: concurrent.futures.Future | None = None
        self._problems: dict[tuple[int, tuple[str, ...] | None], list[str]] = {}

    def steps(self) -> list[int]:
        """The steps that are there, complete, but perhaps damaged; oldest first."""
        names = (path.name for path in self.directory.iterdir() if path.is_dir()) if self.directory.is_dir() else ()
        return sorted(int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name))

    def path(self, step: int) -> pathlib.Path:
        """The directory of a checkpoint."""
        return self.directory / str(step)

    def latest(self, items: tuple[str, ...] | None = None) -> int | None:
        """The step of the newest sound checkpoint, or None where there is none of any kind.

        Args:
          items: of those that matter (`WEIGHTS`); None for all.

        Raises:
          UserError: all are damaged.
        """
        self.wait()
        return self.processes.broadcast(lambda: self._latest(items))

    def _latest(self, items: tuple[str, ...] | None) -> int | None:
        steps, known = self.steps(), len(self._problems)
        newest = next((step for step in reversed(steps) if self._is_valid(step, items)), None)
        if newest is None and steps:
            raise UserError(
                f"{self.directory}: no checkpoint is sound; damaged: {', '.join(map(str, steps))}. Bring one "
                f"back from a copy, or start anew with another --logdir."
            )
        if newest is not None and newest != steps[-1] and len(self._problems) > known:
            _log(f"{self.path(newest)} is used instead.")
        return newest

    def problems(self, step: int, items: tuple[str, ...] | None = None) -> list[str]:
        """Returns what is wrong with a checkpoint, nothing where it is sound; checked once, by its manifest if it has one."""
        if self._problems.get((step, None)) == []:
            return []
        if (step, items) not in self._problems:
            found = checkpoint_manifest.problems(self.path(step), items)
            self._problems[step, items] = self._check_without_manifest(step, items) if found is None else found
        return self._problems[step, items]

    def save(self, model: str, state: dict, data_state: Any):
        """Begins to write a checkpoint of `state["step"]`; it appears under its name only when it is complete.

        Arrays are copied before this returns, so the state may be donated to the next step; `ShardedVariable`s, for whose copy
        a host need not have room, are on disk by then. Raises UserError when the disk is full; older checkpoints are untouched
        then. Damaged ones that `latest` passed over are renamed to `STEP.damaged`. Of `data_state` the first process's counts.
        """
        rest = {name: value for name, value in state.items() if name != "theta"}
        meta = {"model": model, "weights": _shapes(state["theta"]), "data_state": data_state}
        self._save(int(np.asarray(state["step"])), meta, theta=state["theta"], rest=rest)

    def save_weights(self, step: int, model: str, theta: dict, origin: str):
        """Begins to write a checkpoint of weights alone, as `save` does; it can be used, but not trained on.

        Args:
          step: that it is of.
          model: the registered name.
          theta: the weights.
          origin: how they came about, in a few words.
        """
        self._save(step, {"model": model, "weights": _shapes(theta), "data_state": None, "origin": origin}, theta=theta)

    def restore(self, model: str, specs: dict, shardings: dict | None) -> Saved:
        """Reads the newest sound checkpoint.

        Args:
          model: the registered name, for messages.
          specs: the tree of `Spec`s of the training state.
          shardings: the tree of its shardings; they need not be those it was saved under. None for leaves of which nothing is
            read before it is asked for, see `sharded_checkpoint.StoredArray`.

        Raises:
          UserError: no checkpoint, one of a model with other weights or of weights alone, or only damaged ones.
        """
        step, meta = self._meta(model, specs["theta"], None)
        if shardings is None:
            wanted, ask = specs, sharded_checkpoint.restore_of
        else:
            wanted, ask = _abstract(specs, shardings), orbax.args.StandardRestore
        parts = {"theta": wanted["theta"], "rest": {k: v for k, v in wanted.items() if k != "theta"}}
        found = self._read(step, **{name: ask(parts[name]) for name in ARRAYS})
        return Saved(step, {"theta": found["theta"], **found["rest"]}, meta["data_state"])

    def require(self, model: str, theta_specs: dict):
        """Raises the UserErrors of `restore` (of `restore_theta` to one that only reads) before a program is compiled."""
        self._meta(model, theta_specs, WEIGHTS if self._keep is None else None)

    def restore_theta(self, model: str, specs: dict, shardings: dict, step: int | None = None) -> tuple[int, dict]:
        """Reads (step, weights) of the newest sound checkpoint, or of `step`; otherwise as `restore`, for `theta` alone."""
        step, _ = self._meta(model, specs, WEIGHTS, step)
        return step, self._read(step, theta=orbax.args.StandardRestore(_abstract(specs, shardings)))["theta"]

    def wait(self):
        """Returns when all that was saved is on disk; raises UserError where it could not be written."""
        sealing, self._pending_manifest = self._pending_manifest, None
        if sealing is not None:
            with _disk_errors(self.directory):
                sealing.result()

    def close(self):
        """Waits, and lets go of the directory."""
        self.wait()
        self._manifest_writer.shutdown()
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    def _save(self, step: int, meta: dict, **arrays: dict):
        self.wait()
        parted = sharded_checkpoint.has_sharded_variables(arrays)
        write = sharded_checkpoint.SaveShardedVariables if parted else orbax.args.StandardSave
        with _disk_errors(self.directory):
            self.processes.broadcast(self._make_room)
            if self._manager is None:
                # A killed process leaves a temporary directory.
                options = orbax.CheckpointManagerOptions(
                    max_to_keep=self._keep,
                    cleanup_tmp_directories=True,
                    create=False,
                    multiprocessing_options=self._together,
                )
                self._manager = orbax.CheckpointManager(self.directory, options=options, item_names=_ITEMS)
            # A cadence of its own would skip a save that falls due by ours.
            self._manager.save(
                step,
                force=True,
                args=orbax.args.Composite(
                    meta=orbax.args.JsonSave(meta), **{name: write(value) for name, value in arrays.items()}
                ),
            )
            if parted:
                self._manager.wait_until_finished()  # nothing was copied, and the next step changes it
        self._pending_manifest = self._manifest_writer.submit(self._write_manifest, step, len(tree.flatten(arrays)))

    def _write_manifest(self, step: int, arrays: int):
        """Writes the manifest once Orbax has committed the checkpoint; the loop goes on meanwhile."""
        self._manager.wait_until_finished()
        if self.processes.is_primary:
            checkpoint_manifest.write_manifest(self.path(step), arrays)

    def _make_room(self):
        """Makes the directory, and room for the numbers of damaged checkpoints: training has gone on from before them."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for step in [step for (step, items), found in self._problems.items() if found and items is None]:
            names = itertools.chain([f"{step}.damaged"], (f"{step}.damaged.{number}" for number in itertools.count(2)))
            aside = next(self.directory / name for name in names if not (self.directory / name).exists())
            self.path(step).rename(aside)
            del self._problems[step, None]
            _log(f"{self.path(step)} is damaged and now called {aside.name}.")

    def _is_valid(self, step: int, items: tuple[str, ...] | None) -> bool:
        """Whether nothing is wrong; what is wrong is told once."""
        known = (step, items) in self._problems
        found = self.problems(step, items)
        if found and not known:
            _log(f"{self.path(step)} is damaged: {summary(found)}.")
        return not found

    def _check_without_manifest(self, step: int, items: tuple[str, ...] | None) -> list[str]:
        """Reads what has no manifest, in part a weaker check; writes the manifest if it may."""
        reader = Reader(self.path(step))
        found = reader.problems(items)
        if not found:
            _log(
                f"{self.path(step)} has no {checkpoint_manifest.MANIFEST} (the process may have been killed before it was written); "
                f"its arrays were read instead, and none is damaged."
            )
            if self._keep is not None and items is None:
                with _disk_errors(self.directory):
                    checkpoint_manifest.write_manifest(self.path(step), len(reader.specs()))
        return found

    def _meta(
        self, model: str, theta_specs: dict, items: tuple[str, ...] | None, step: int | None = None
    ) -> tuple[int, dict]:
        step = self.latest(items) if step is None else step
        if step is None:
            raise UserError(
                f"{self.directory}: no checkpoint. Train first: python -m lingvo_moe train --model={model} "
                f"--logdir={self.directory.parent}"
            )
        meta = self.processes.broadcast(lambda: Reader(self.path(step)).meta)
        expected = {path: list(spec.shape) for path, spec in tree.flatten(theta_specs).items()}
        if meta["weights"] != expected:
            raise UserError(
                f"{self.path(step)} holds {meta['model']}, whose weights are not those of {model}: "
                f"{first_difference(meta['weights'], expected)}. Pass that --model (with the --set it was trained "
                f"with), or another --logdir."
            )
        if items is None and "origin" in meta:
            raise UserError(
                f"{self.path(step)} holds weights alone ({meta['origin']}), which translate and eval can use; to "
                f"go on training, the optimizer state are missing. Pass the --logdir that they were trained in."
            )
        return step, meta

    def _read(self, step: int, **items: orbax.args.CheckpointArgs) -> Any:
        try:
            reading = orbax.Checkpointer(
                orbax.CompositeCheckpointHandler(*_ITEMS), multiprocessing_options=self._together
            )
            return reading.restore(self.path(step), args=orbax.args.Composite(**items))
        except Exception as error:  # Orbax raises whatever is wrong, and the bare class, too
            raise UserError(
                f"{self.path(step)}: the checkpoint cannot be read ({reason(error)}), though its files are as they "
                f"were written."
            ) from error


def summary(problems: list[str]) -> str:
    """The first of them, and how many there are besides."""
    return problems[0] + (f" and {len(problems) - 1} more" if len(problems) > 1 else "")


def first_difference(found: dict, expected: dict) -> str:
    """Two dicts by path in a part of a line: the first path whose values differ, and how."""
    for path in sorted(found.keys() | expected.keys()):
        if found.get(path) != expected.get(path):
            return f"{path} is {found.get(path, 'absent')} there, {expected.get(path, 'absent')} here"
    return "in no weight"


def _log(line: str):
    print(f"checkpoint: {line}", file=sys.stderr, flush=True)


def _shapes(theta: dict) -> dict[str, list[int]]:
    return {path: list(value.shape) for path, value in tree.flatten(theta).items()}


def _abstract(specs: dict, shardings: dict) -> dict:
    return tree.map_leaves(
        lambda spec, sharding: jax.ShapeDtypeStruct(spec.shape, np.dtype(spec.dtype), sharding=sharding),
        specs,
        shardings,
    )


@contextlib.contextmanager
def _disk_errors(directory: pathlib.Path) -> Iterator[None]:
    """Turns what the file system refuses into one line that says what is still safe."""
    try:
        yield
    except Exception as error:
        reason = next((refusal for refusal in _REFUSALS if refusal in str(error)), None)
        if reason is None and isinstance(error, OSError):
            reason = error.strerror
        if reason is None and "NOT_FOUND" in str(error):  # TensorStore, of a file that it has just written
            reason = "somebody has removed what was written"
        if reason is None:
            raise
        free = shutil.disk_usage(next(path for path in (directory, *directory.parents) if path.is_dir())).free
        raise UserError(
            f"{directory}: the checkpoint could not be written ({reason}; {free / 2**20:.0f} MiB are free). "
            f"Checkpoints saved before are complete. Make room and run the same command again."
        ) from error
