"""Checkpoints: the training state and the place in the data, saved atomically by Orbax.

`LOGDIR/checkpoints/STEP/` holds three items: `theta` (the weights), `rest` (step, seed and the optimizer's slots) and `meta`
(the model's name, the shape of every weight, and the state of the input pipeline). Translation reads the first alone.
"""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
from typing import Any

import jax
import numpy as np
from orbax import checkpoint as orbax

from lingvo_moe import tree
from lingvo_moe.errors import UserError

_ARRAYS = ("theta", "rest")


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

    def __init__(self, logdir: str | pathlib.Path, keep: int = 3):
        """Opens `logdir/checkpoints`, of which at most `keep` are kept; nothing is created before the first save."""
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
          UserError: no checkpoint, or one of a model with other weights.
        """
        step, meta = self._meta(model, specs["theta"])
        abstract = _abstract(specs, shardings)
        parts = {"theta": abstract["theta"], "rest": {k: v for k, v in abstract.items() if k != "theta"}}
        found = self._open().restore(step, args=orbax.args.Composite(
            **{name: orbax.args.StandardRestore(parts[name]) for name in _ARRAYS}))
        return Saved(step, {"theta": found["theta"], **found["rest"]}, meta["data_state"])

    def require(self, model: str, theta_specs: dict):
        """Raises the UserErrors of `restore_theta` early, before a program is compiled."""
        self._meta(model, theta_specs)

    def restore_theta(self, model: str, specs: dict, shardings: dict) -> tuple[int, dict]:
        """Reads (step, weights) of the newest checkpoint; arguments and errors as `restore`, for `theta` alone."""
        step, _ = self._meta(model, specs)
        found = self._open().restore(step, args=orbax.args.Composite(
            theta=orbax.args.StandardRestore(_abstract(specs, shardings))))
        return step, found["theta"]

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
            options = orbax.CheckpointManagerOptions(max_to_keep=self._keep, create=True)
            with _disk_errors(self.directory):
                self._manager = orbax.CheckpointManager(
                    self.directory, options=options, item_names=(*_ARRAYS, "meta"))
        return self._manager

    def _meta(self, model: str, theta_specs: dict) -> tuple[int, dict]:
        step = self.latest()
        if step is None:
            raise UserError(f"{self.directory}: no checkpoint. Train first: python -m lingvo_moe train --model={model} "
                            f"--logdir={self.directory.parent}")
        meta = self._open().restore(step, args=orbax.args.Composite(meta=orbax.args.JsonRestore()))["meta"]
        expected = {path: list(spec.shape) for path, spec in tree.flatten(theta_specs).items()}
        if meta["weights"] != expected:
            raise UserError(f"{self.directory / str(step)} holds {meta['model']}, whose weights are not those of {model}: "
                            f"{_first_difference(meta['weights'], expected)}. Pass that --model (with the --set it was trained "
                            f"with), or another --logdir.")
        return step, meta


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


class _disk_errors:
    """Turns what the file system refuses into one line that says what is still safe."""

    def __init__(self, directory: pathlib.Path):
        self._directory = directory

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if error is None or isinstance(error, UserError):
            return
        if isinstance(error, OSError) or "No space left" in str(error) or "Permission denied" in str(error):
            free = shutil.disk_usage(next(p for p in (self._directory, *self._directory.parents) if p.exists())).free
            raise UserError(f"{self._directory}: the checkpoint could not be written ({error}); {free / 2**20:.0f} MiB are free. "
                            f"Checkpoints saved before are complete. Make room and run the same command again.") from error
