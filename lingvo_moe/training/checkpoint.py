"""Checkpoints: the training state and the place in the data, saved atomically by Orbax.

`LOGDIR/checkpoints/STEP/` holds three items: `theta` (the weights), `rest` (step, seed and the optimizer's slots) and `meta`
(the model's name, the shape of every weight, and the state of the input pipeline). Translation reads the first alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from orbax import checkpoint as orbax

from lingvo_moe import tree
from lingvo_moe.errors import UserError

_ARRAYS = ("theta", "rest")
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
    """The checkpoints of one log directory."""

    def __init__(self, logdir: str | pathlib.Path, keep: int | None = None):
        """Opens `logdir/checkpoints`; nothing is created before the first save.

        Args:
          logdir: the log directory.
          keep: how many checkpoints stay as more are saved; None to read alone.
        """
        self.directory = pathlib.Path(logdir).absolute() / "checkpoints"
        self._manager: orbax.CheckpointManager | None = None
        self._keep = keep

    def latest(self) -> int | None:
        """The step of the newest complete checkpoint, or None."""
        return self._open().latest_step() if self.directory.is_dir() else None

    def save(self, model: str, state: dict, data_state: Any):
        """Begins to write a checkpoint of `state["step"]`; it appears under its name only when it is complete.

        Arrays are copied before this returns, so the state may be donated to the next step. Raises UserError when the disk is
        full; older checkpoints are untouched then.
        """
        step = int(state["step"])
        rest = {name: value for name, value in state.items() if name != "theta"}
        meta = {"model": model, "weights": _shapes(state["theta"]), "data_state": data_state}
        # A cadence of their own would skip a save that falls due by ours.
        with _disk_errors(self.directory):
            self._open().save(step, force=True, args=orbax.args.Composite(
                theta=orbax.args.StandardSave(state["theta"]), rest=orbax.args.StandardSave(rest),
                meta=orbax.args.JsonSave(meta)))

    def restore(self, model: str, specs: dict, shardings: dict) -> Saved:
        """Reads the newest checkpoint.

        Args:
          model: the registered name, for messages.
          specs: the tree of `Spec`s of the training state.
          shardings: the tree of its shardings; they need not be those it was saved under.

        Raises:
          UserError: no checkpoint, one of a model with other weights, or a damaged one.
        """
        step, meta = self._meta(model, specs["theta"])
        abstract = _abstract(specs, shardings)
        parts = {"theta": abstract["theta"], "rest": {k: v for k, v in abstract.items() if k != "theta"}}
        found = self._read(step, **{name: orbax.args.StandardRestore(parts[name]) for name in _ARRAYS})
        return Saved(step, {"theta": found["theta"], **found["rest"]}, meta["data_state"])

    def require(self, model: str, theta_specs: dict):
        """Raises the UserErrors of `restore_theta` early, before a program is compiled."""
        self._meta(model, theta_specs)

    def restore_theta(self, model: str, specs: dict, shardings: dict) -> tuple[int, dict]:
        """Reads (step, weights) of the newest checkpoint; arguments and errors as `restore`, for `theta` alone."""
        step, _ = self._meta(model, specs)
        return step, self._read(step, theta=orbax.args.StandardRestore(_abstract(specs, shardings)))["theta"]

    def wait(self):
        """Returns when all that was saved is on disk; raises UserError where it could not be written."""
        if self._manager is not None:
            with _disk_errors(self.directory):
                self._manager.wait_until_finished()

    def close(self):
        """Waits, and lets go of the directory."""
        self.wait()
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    def _open(self) -> orbax.CheckpointManager:
        if self._manager is None:
            writes = self._keep is not None
            # A killed process leaves a temporary directory; to one that only reads it may be a save in progress.
            options = orbax.CheckpointManagerOptions(
                max_to_keep=self._keep, create=writes, cleanup_tmp_directories=writes)
            with _disk_errors(self.directory):
                self._manager = orbax.CheckpointManager(
                    self.directory, options=options, item_names=(*_ARRAYS, "meta"))
        return self._manager

    def _meta(self, model: str, theta_specs: dict) -> tuple[int, dict]:
        step = self.latest()
        if step is None:
            raise UserError(f"{self.directory}: no checkpoint. Train first: python -m lingvo_moe train --model={model} "
                            f"--logdir={self.directory.parent}")
        meta = self._read(step, meta=orbax.args.JsonRestore())["meta"]
        if not {"model", "weights", "data_state"} <= meta.keys():
            raise self._damaged(step, "its meta lacks an entry")
        expected = {path: list(spec.shape) for path, spec in tree.flatten(theta_specs).items()}
        if meta["weights"] != expected:
            raise UserError(f"{self.directory / str(step)} holds {meta['model']}, whose weights are not those of {model}: "
                            f"{_first_difference(meta['weights'], expected)}. Pass that --model (with the --set it was trained "
                            f"with), or another --logdir.")
        return step, meta

    def _read(self, step: int, **items: orbax.args.CheckpointArgs) -> Any:
        try:
            return self._open().restore(step, args=orbax.args.Composite(**items))
        except Exception as error:  # Orbax raises whatever the damage led to, and the bare class, too
            first_line = str(error).partition("\n")[0]
            raise self._damaged(step, f"{type(error).__name__}: {first_line[:200]}") from error

    def _damaged(self, step: int, reason: str) -> UserError:
        return UserError(f"{self.directory / str(step)}: the checkpoint cannot be read ({reason}). If it is damaged, move it away "
                         f"to go on from the one before.")


def _shapes(theta: dict) -> dict[str, list[int]]:
    return {path: list(value.shape) for path, value in tree.flatten(theta).items()}


def _first_difference(saved: dict, expected: dict) -> str:
    for path in sorted(saved.keys() | expected.keys()):
        if saved.get(path) != expected.get(path):
            return f"{path} is {saved.get(path, 'absent')} there, {expected.get(path, 'absent')} here"
    return "in no weight"


def _abstract(specs: dict, shardings: dict) -> dict:
    return tree.map_leaves(lambda spec, sharding: jax.ShapeDtypeStruct(spec.shape, np.dtype(spec.dtype), sharding=sharding),
                           specs, shardings)


@contextlib.contextmanager
def _disk_errors(directory: pathlib.Path) -> Iterator[None]:
    """Turns what the file system refuses into one line that says what is still safe."""
    try:
        yield
    except Exception as error:
        reason = next((refusal for refusal in _REFUSALS if refusal in str(error)), None)
        if reason is None and isinstance(error, OSError):
            reason = error.strerror
        if reason is None:
            raise
        free = shutil.disk_usage(next(path for path in (directory, *directory.parents) if path.is_dir())).free
        raise UserError(f"{directory}: the checkpoint could not be written ({reason}; {free / 2**20:.0f} MiB are free). "
                        f"Checkpoints saved before are complete. Make room and run the same command again.") from error
