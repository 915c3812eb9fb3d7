"""Checkpoints: the training state and the position in the data, saved atomically by Orbax.

`LOGDIR/checkpoints/STEP/` holds three items: `theta` (the weights), `rest` (step, seed and the optimizer state) and
`meta` (the model's name, the shape of every weight, and the state of the input pipeline). Inference reads `theta` and
`meta` only. `manifest.json` beside them lists the files, see `checkpoint_manifest`; the arrays have checksums, see
`checkpoint_arrays`.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import logging
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
from orbax import checkpoint as orbax

from lingvo_moe import tree
from lingvo_moe.data.batching import READERS_KEY
from lingvo_moe.distributed.process_group import ProcessGroup
from lingvo_moe.errors import UserError
from lingvo_moe.training import checkpoint_arrays, checkpoint_manifest, disk_errors
from lingvo_moe.training.checkpoint_errors import (
    CorruptCheckpoint,
    RemovedCheckpoint,
    UnreadableCheckpoint,
    is_corruption,
    is_read_failure,
    reason,
    removed,
)
from lingvo_moe.training.checkpoint_reader import ARRAYS, WEIGHTS, Reader, this_process
from lingvo_moe.utils import allocator

Value = TypeVar("Value")
_logger = logging.getLogger(__name__)
_ITEMS = (*ARRAYS, "meta")
# What Orbax and TensorStore do not take for a part of a file's name: a backslash is a slash to them, `gs:/` begins the
# address of a cloud, and text that is not UTF-8 is an error. As they write, they also look for files by patterns, and
# would find none below `run[1]`: the checkpoint would have no arrays.
_NOT_IN_PATHS, _NOT_WRITTEN = re.compile(r"\\|gs:(?=/)|[\ud800-\udfff]"), re.compile(r"[*?[]")


@dataclasses.dataclass(frozen=True)
class Restored:
    """A restored checkpoint.

    Attributes:
      step: number of training steps.
      state: the training state, with the shardings that were asked for.
      data_state: the state of the input pipeline; None before the first batch.
    """

    step: int
    state: dict
    data_state: Any


class _Manager(orbax.CheckpointManager):
    """Orbax's manager without its own preemption check: the training loop asks, and JAX's service has one counter."""

    def reached_preemption(self, step: int) -> bool:
        """Returns False."""
        return False


class Checkpoints:
    """The checkpoints of one log directory.

    The newest valid checkpoint is used. A corrupt one is logged, and the one before it takes its place: what is missing
    or has another size is found by `latest`, changed content when it is restored. Of several processes each writes and
    reads what its devices hold, and a checkpoint that one of them cannot read is passed over by all; the primary
    process does the rest.
    """

    def __init__(self, logdir: str | pathlib.Path, keep: int | None = None, processes: ProcessGroup | None = None):
        """Opens `logdir/checkpoints`; nothing is created before the first save.

        Args:
          logdir: the log directory.
          keep: how many checkpoints to retain as more are saved; None to read only.
          processes: those whose devices hold the arrays; all call the same methods in the same order. None for
            this process alone.

        Raises:
          UserError: the path has a character with which checkpoints would be lost.
        """
        self.processes = processes = processes or ProcessGroup()
        # With explicit process numbers Orbax synchronises through JAX's coordination service; otherwise by a program on
        # all devices, from any thread, which may run between two training steps that another process starts in another
        # order.
        everyone = set(range(processes.count)) if processes.count > 1 else None
        self._multiprocessing = orbax.options.MultiprocessingOptions(active_processes=everyone)
        self.directory = pathlib.Path(logdir).absolute() / "checkpoints"
        _check_path(self.directory, keep is not None)
        self._keep = keep
        self._manager: _Manager | None = None
        self._manifest_writer = concurrent.futures.ThreadPoolExecutor(1, "manifest")
        self._pending_manifest: concurrent.futures.Future | None = None
        self._problems: dict[tuple[int, tuple[str, ...] | None], list[str]] = {}
        self._fallback: int | None = None

    def steps(self) -> list[int]:
        """Returns the steps of all complete checkpoints, oldest first; some may be corrupt."""
        names = (path.name for path in self.directory.iterdir() if path.is_dir()) if self.directory.is_dir() else ()
        return sorted(int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name))

    def path(self, step: int) -> pathlib.Path:
        """Returns the directory of a checkpoint."""
        return self.directory / str(step)

    def latest(self, items: tuple[str, ...] | None = None) -> int | None:
        """Returns the step of the newest valid checkpoint, or None where there is no checkpoint.

        Files are compared with the manifest, without reading the arrays.

        Args:
          items: the items that must be valid (`WEIGHTS`); None for all.

        Raises:
          UserError: all checkpoints are corrupt.
        """
        self.wait()
        return self.processes.broadcast(lambda: self._latest(items))

    def problems(self, step: int, items: tuple[str, ...] | None = None) -> list[str]:
        """Returns what is wrong with a checkpoint as far as is known; empty for a valid one.

        The files are compared with the manifest once. Without a manifest the arrays are read instead.
        """
        if self._problems.get((step, None)) == []:
            return []
        if (step, items) not in self._problems:
            found = checkpoint_manifest.problems(self.path(step), items)
            self._problems[step, items] = self._check_without_manifest(step, items) if found is None else found
        return self._problems[step, items]

    def save(self, model: str, state: dict, data_state: Any):
        """Starts an asynchronous checkpoint of `state["step"]`; it appears under its name only when it is complete.

        Arrays are copied to the host before this returns, so the state may be donated to the next step. A
        `ShardedTensor`, of which a host need not hold a copy, is on disk by then. Corrupt checkpoints that `latest`
        or `restore` passed over are renamed to `STEP.corrupt`.

        Args:
          model: the registered name.
          state: the training state.
          data_state: the state of the input pipeline, as JSON; the primary process's is saved.

        Raises:
          UserError: the disk is full, or refuses to write for another reason; older checkpoints are untouched.
        """
        rest = {name: value for name, value in state.items() if name != "theta"}
        meta = {"model": model, "weights": _shapes(state["theta"]), "data_state": data_state}
        self._save(int(np.asarray(state["step"])), meta, theta=state["theta"], rest=rest)

    def save_weights(self, step: int, model: str, theta: dict, origin: str, tokenizer_hashes: list[str] | None = None):
        """Starts to write a checkpoint of weights only, as `save` does; it can be used, but not trained on.

        Args:
          step: the step under which to save it.
          model: the registered name.
          theta: the weights.
          origin: where the weights come from, in a few words.
          tokenizer_hashes: see `Reader.tokenizer_hashes`.
        """
        meta = {"model": model, "weights": _shapes(theta), "data_state": None, "origin": origin}
        self._save(step, meta if tokenizer_hashes is None else {**meta, READERS_KEY: tokenizer_hashes}, theta=theta)

    def restore(
        self, model: str, specs: dict, shardings: dict | None, load: Callable[[dict], None] = lambda state: None
    ) -> Restored:
        """Reads the newest checkpoint that can be read; one that turns out corrupt is logged and passed over.

        Args:
          model: the registered name, for messages.
          specs: the tree of `Spec`s of the training state.
          shardings: the tree of its shardings; they need not be those it was saved under. None for leaves that are read
            when they are indexed, see `checkpoint_arrays.StoredArray`.
          load: takes the state. Without shardings this is what reads the arrays, so a checkpoint that it finds corrupt
            (`CorruptCheckpoint`) is passed over too, and it is called again.

        Raises:
          UserError: no checkpoint, one of a model with other weights or of weights only, or corrupt ones only.
        """
        items = {"theta": specs["theta"], "rest": {k: v for k, v in specs.items() if k != "theta"}}
        targets: dict[str, dict | None] = dict.fromkeys(items)
        if shardings is not None:
            targets = {"theta": shardings["theta"], "rest": {k: v for k, v in shardings.items() if k != "theta"}}
        arguments = {name: _restore_arguments(items[name], targets[name]) for name in ARRAYS}
        while True:
            step, meta = self._meta(model, specs["theta"], None)
            try:
                found = self._in_all_processes(lambda step=step: self._read(step, arguments))
                state = {"theta": found["theta"], **found["rest"]}
                self._in_all_processes(lambda state=state: load(state))
                return Restored(step, state, meta["data_state"])
            except CorruptCheckpoint as error:
                self._mark_corrupt(step, None, str(error))

    def newest_compatible_state(self, model: str, specs: dict) -> tuple[int, int]:
        """Returns (step, `training.seed`) of the checkpoint that `restore` will read, unless its arrays are corrupt.

        Raises the UserErrors of `restore` that need no array but the seed to be read; arguments are those of `restore`.
        """
        expected = _shapes({name: part for name, part in specs.items() if name != "theta"})
        while True:
            step, _ = self._meta(model, specs["theta"], None)
            path = self.path(step)
            found = self.processes.broadcast(lambda path=path: _stored_shapes(path, "rest"))
            if found not in (None, expected):
                raise UserError(
                    f"{path} was saved with other settings of the optimizer or of training.ema_decay: "
                    f"{first_difference(found, expected)}. Pass the --set flags that it was trained with, or start new "
                    f"training from its weights: another --logdir, and --initial_weights={self.directory.parent}."
                )
            try:
                return step, self._in_all_processes(lambda path=path: int(Reader(path).read("seed")[1]))
            except CorruptCheckpoint as error:
                self._mark_corrupt(step, None, str(error))

    def newest_compatible_step(self, model: str, theta_specs: dict) -> int:
        """Returns the newest step; raises the UserErrors of `restore_theta` that need no array to be read."""
        step, _ = self._meta(model, theta_specs, WEIGHTS if self._keep is None else None)
        return step

    def restore_theta(
        self,
        model: str,
        specs: dict,
        shardings: dict | None,
        step: int | None = None,
        load: Callable[[dict], None] = lambda theta: None,
    ) -> tuple[int, dict]:
        """Returns (step, weights) of the newest checkpoint whose weights can be read, or of `step`.

        Args:
          model: the registered name, for messages.
          specs: the tree of `Spec`s of the weights.
          shardings: see `restore`, of the weights.
          step: of a checkpoint; None for the newest.
          load: see `restore`, of the weights.

        Raises:
          UserError: as `restore`, or the checkpoint of `step` is corrupt or gone.
        """
        arguments = {"theta": _restore_arguments(specs, shardings)}
        while True:
            candidate, _ = self._meta(model, specs, WEIGHTS, step)
            try:
                found = self._in_all_processes(lambda candidate=candidate: self._read(candidate, arguments))
                self._in_all_processes(lambda theta=found["theta"]: load(theta))
                return candidate, found["theta"]
            except CorruptCheckpoint as error:
                if step is not None:
                    raise UserError(f"{self.path(step)} is corrupt: {error}. Choose another step.") from None
                self._mark_corrupt(candidate, WEIGHTS, str(error))

    def data_state(self, step: int) -> Any:
        """Returns the state of the input pipeline of a step."""
        return self.processes.broadcast(lambda: Reader(self.path(step)).meta["data_state"])

    def tokenizer_hashes(self, step: int) -> list[str] | None:
        """Returns `Reader.tokenizer_hashes` of a step."""
        return self.processes.broadcast(lambda: Reader(self.path(step)).tokenizer_hashes)

    def wait(self):
        """Returns when all that was saved is on disk; raises UserError where it could not be written."""
        pending, self._pending_manifest = self._pending_manifest, None
        if pending is not None:
            with disk_errors.of_checkpoints(self.directory):
                pending.result()

    def close(self):
        """Waits and raises as `wait` does; releases the directory in any case."""
        try:
            self.wait()
        finally:
            self._manifest_writer.shutdown()
            if self._manager is not None:
                manager, self._manager = self._manager, None
                with disk_errors.of_checkpoints(self.directory):  # of a save that `wait` has reported already
                    manager.close()

    def _save(self, step: int, meta: dict, **arrays: dict):
        self.wait()
        with disk_errors.of_checkpoints(self.directory):
            self.processes.broadcast(self._set_corrupt_aside)
            items = {name: checkpoint_arrays.save_arguments(value) for name, value in arrays.items()}
            manager = self._open_manager()
            # `force`: the manager's own cadence would skip a save that is due by ours.
            manager.save(step, force=True, args=orbax.args.Composite(meta=orbax.args.JsonSave(meta), **items))
            if checkpoint_arrays.has_sharded_tensors(arrays):
                manager.wait_until_finished()  # nothing was copied, and the next step changes it
        self._pending_manifest = self._manifest_writer.submit(self._write_manifest, step, len(tree.flatten(arrays)))

    def _open_manager(self) -> _Manager:
        if self._manager is None:
            options = orbax.CheckpointManagerOptions(
                max_to_keep=self._keep,
                cleanup_tmp_directories=True,  # of killed processes
                create=False,
                multiprocessing_options=self._multiprocessing,
            )
            self._manager = _Manager(self.directory, options=options, item_names=_ITEMS)
        return self._manager

    def _write_manifest(self, step: int, arrays: int):
        """Writes the manifest once Orbax has committed the checkpoint, while training continues."""
        if self._manager is not None:
            self._manager.wait_until_finished()
        if self.processes.is_primary:
            checkpoint_manifest.write_manifest(self.path(step), arrays)
        # What a save has freed, in threads of its own, would not be used again: the process would grow with each one.
        allocator.return_freed_memory()

    def _set_corrupt_aside(self):
        """Makes the directory, and renames corrupt checkpoints, whose steps are trained and saved again."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for step in [step for (step, items), found in self._problems.items() if found and items is None]:
            names = itertools.chain([f"{step}.corrupt"], (f"{step}.corrupt.{number}" for number in itertools.count(2)))
            aside = next(self.directory / name for name in names if not (self.directory / name).exists())
            self.path(step).rename(aside)
            del self._problems[step, None]
            _logger.warning("%s is corrupt and was renamed to %s.", self.path(step), aside.name)

    def _latest(self, items: tuple[str, ...] | None) -> int | None:
        steps = self.steps()
        newest = next((step for step in reversed(steps) if self._is_valid(step, items)), None)
        if newest is None and steps:
            raise UserError(
                f"{self.directory}: no checkpoint is valid; corrupt: {', '.join(map(str, steps))}. Restore one from a "
                f"copy, or start again with another --logdir."
            )
        if newest is not None and newest not in (steps[-1], self._fallback):
            self._fallback = newest
            _logger.warning("%s is used instead.", self.path(newest))
        return newest

    def _is_valid(self, step: int, items: tuple[str, ...] | None) -> bool:
        """Returns whether a checkpoint is valid; logs its problems once."""
        known = (step, items) in self._problems
        found = self.problems(step, items)
        if found and not known:
            _logger.warning("%s is corrupt: %s.", self.path(step), summary(found))
        return not found

    def _mark_corrupt(self, step: int, items: tuple[str, ...] | None, problem: str):
        """Records and logs what was found while a checkpoint was read; `latest` passes it over from now on."""
        self._problems[step, items] = self._problems[step, None] = [problem]
        if self.processes.is_primary:
            _logger.warning("%s is corrupt: %s.", self.path(step), problem)

    def _check_without_manifest(self, step: int, items: tuple[str, ...] | None) -> list[str]:
        """Reads the arrays of a checkpoint that has no manifest; writes the manifest unless this only reads."""
        reader = Reader(self.path(step))
        found = reader.problems(items)
        if not found:
            _logger.warning(
                "%s has no %s (training is about to write it, or was killed before); its arrays were read instead, and "
                "none is corrupt.",
                self.path(step),
                checkpoint_manifest.MANIFEST,
            )
            if self._keep is not None and items is None:
                with disk_errors.of_checkpoints(self.directory):
                    checkpoint_manifest.write_manifest(self.path(step), len(reader.specs()))
        return found

    def _meta(
        self, model: str, theta_specs: dict, items: tuple[str, ...] | None, step: int | None = None
    ) -> tuple[int, dict]:
        """Returns (step, meta) of the newest valid checkpoint or of `step`; raises UserError for another model's."""
        if step is not None and step not in self.steps():
            raise removed(self.path(step))
        step = self.latest(items) if step is None else step
        if step is None:
            if self.directory.parent.is_file():
                raise UserError(f"{self.directory.parent} is a file; expected the log directory of a training run.")
            raise UserError(
                f"{self.directory}: no checkpoint. Train first: python -m lingvo_moe train --model={model} "
                f"--logdir={self.directory.parent}"
            )
        path = self.path(step)
        meta = self.processes.broadcast(lambda: Reader(path).meta)
        expected = {path: list(spec.shape) for path, spec in tree.flatten(theta_specs).items()}
        if meta["weights"] != expected:
            remedy = "Pass that --model (with the --set it was trained with)"
            if meta["model"] == model:
                remedy = "Pass the --set of the model that it was trained with, and no other --set of the model"
            raise UserError(
                f"{path} holds {meta['model']}, whose weights are not those of {model}: "
                f"{first_difference(meta['weights'], expected)}. {remedy}, or name another log directory."
            )
        if items is None and "origin" in meta:
            raise UserError(
                f"{path} holds weights only ({meta['origin']}), which translate and eval can use; training needs the "
                f"optimizer state too. Pass the --logdir in which they were trained, or a new one with "
                f"--initial_weights={self.directory.parent}."
            )
        return step, meta

    def _read(self, step: int, items: Mapping[str, orbax.args.CheckpointArgs]) -> Any:
        """Reads what this process needs of these items; raises CorruptCheckpoint if stored bytes changed."""
        try:
            on_devices: dict[str, Any] = {
                name: checkpoint_arrays.devices_handler(arguments)
                for name, arguments in items.items()
                if isinstance(arguments, orbax.args.StandardRestore)
            }
            others = [name for name in _ITEMS if name not in on_devices]
            handler = orbax.CompositeCheckpointHandler(*others, **on_devices)
            reader = orbax.Checkpointer(handler, multiprocessing_options=this_process())
            return reader.restore(self.path(step), args=orbax.args.Composite(**items))
        except Exception as error:  # Orbax raises many kinds, the bare class among them
            if is_corruption(error):
                raise CorruptCheckpoint(reason(error)) from error
            if is_read_failure(error):
                raise UnreadableCheckpoint(self.path(step), reason(error)) from error
            raise UserError(
                f"{self.path(step)}: the checkpoint cannot be read ({reason(error)}), though its files are as they "
                f"were written."
            ) from error
        finally:
            allocator.return_freed_memory()  # buffers, as large as the largest arrays

    def _in_all_processes(self, function: Callable[[], Value]) -> Value:
        """Calls a function in each process; raises the UserError of one of them in all, of the same kind."""
        return self.processes.run_in_all(function, (CorruptCheckpoint, RemovedCheckpoint))


def _check_path(directory: pathlib.Path, writes: bool):
    path = f"{directory}/"
    if found := _NOT_IN_PATHS.search(path) or (writes and _NOT_WRITTEN.search(path)):
        raise UserError(
            f"{directory.parent!s}: expected a log directory without {found[0]!r} in its path, which the library that "
            f"writes checkpoints takes for something else, so that they would be lost. Name another one."
        )


def _restore_arguments(specs: dict, shardings: dict | None) -> orbax.args.CheckpointArgs:
    """Returns the arguments that restore an item onto devices, or, without shardings, as `StoredArray`s."""
    if shardings is None:
        return checkpoint_arrays.restore_arguments(specs)
    return checkpoint_arrays.restore_on_devices(specs, shardings)


def summary(problems: list[str]) -> str:
    """Returns the first problem, and how many there are besides."""
    return problems[0] + (f" and {len(problems) - 1} more" if len(problems) > 1 else "")


def first_difference(found: dict, expected: dict) -> str:
    """Returns, as part of a line, the first path for which two different dicts by path differ, and how."""
    paths = sorted(found.keys() | expected.keys())
    pairs = ((path, found.get(path, "absent"), expected.get(path, "absent")) for path in paths)
    path, there, here = next((path, there, here) for path, there, here in pairs if there != here)
    return f"{path} is {there} there, {here} here"


def _shapes(arrays: dict) -> dict[str, list[int]]:
    return {path: list(value.shape) for path, value in tree.flatten(arrays).items()}


def _stored_shapes(path: pathlib.Path, item: str) -> dict[str, list[int]] | None:
    """Returns the shapes of an item's arrays by path; None if their list is corrupt, which `restore` will find."""
    try:
        return {name: list(spec.shape) for name, spec in Reader(path).specs([item]).items()}
    except CorruptCheckpoint:
        return None
