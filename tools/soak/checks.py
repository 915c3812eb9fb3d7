"""Checks of what a fault left: checkpoints, steps, curves, weights. Each returns a line for each problem."""

from __future__ import annotations

import pathlib
from collections.abc import Collection, Mapping

import numpy as np

from lingvo_moe.training import checkpoint_tools
from lingvo_moe.training.checkpoint import Checkpoints
from lingvo_moe.training.checkpoint_reader import Reader
from lingvo_moe.utils.counts import counted

Curves = Mapping[str, Mapping[int, set[float]]]
# Scalars of the machine, not of the model.
_NOT_REPRODUCIBLE = {"tokens_per_second"}


def valid(logdir: pathlib.Path) -> list[int]:
    """Returns the steps whose checkpoints are valid in every file and array, oldest first."""
    checkpoints = Checkpoints(logdir)
    return [step for step in checkpoints.steps() if not checkpoint_tools.verify(checkpoints, step)]


def missing_checkpoints(
    before: Collection[int], after: Collection[int], keep: int, corrupt: Collection[int] = ()
) -> list[str]:
    """Returns the checkpoints that were complete before a process ended and are not valid afterwards.

    Args:
      before: steps of complete checkpoints before.
      after: steps of valid checkpoints afterwards.
      keep: a checkpoint with as many newer valid ones may have been removed.
      corrupt: steps whose checkpoints were not valid when the process started.
    """
    return [
        f"checkpoint {step} was complete and is no longer valid"
        for step in sorted(before)
        if step not in {*after, *corrupt} and sum(other > step for other in after) < keep
    ]


def missing_steps(reached: int, newest: int, most: int) -> list[str]:
    """Returns a problem if more than `most` steps lie between the newest checkpoint and the last step that was made."""
    repeated = reached - newest
    if repeated <= most:
        return []
    return [f"{repeated} steps have to be repeated, {reached} were made, the newest checkpoint is {newest}"]


def different_curves(found: Curves, expected: Curves, complete: bool = True) -> list[str]:
    """Returns where curves are not bit for bit those of the reference.

    Args:
      found: the reported values by scalar and step.
      expected: those of the reference.
      complete: whether every step must be present.
    """
    problems = []
    for name in sorted((found.keys() | expected.keys()) - _NOT_REPRODUCIBLE):
        ours, theirs = found.get(name, {}), expected.get(name, {})
        missing = sorted(theirs.keys() - ours.keys()) if complete else []
        unequal = [step for step in sorted(ours) if not _equal(ours[step], theirs.get(step, set()))]
        if missing:
            problems.append(f"{name} lacks {counted(len(missing), 'step')}, the first is {missing[0]}")
        if unequal:
            first = unequal[0]
            values = f"{sorted(ours[first])} instead of {sorted(theirs.get(first, ()))}"
            problems.append(f"{name} differs in {counted(len(unequal), 'step')}, the first is {first}: {values}")
    return problems


def different_weights(found: pathlib.Path, expected: pathlib.Path, step: int) -> list[str]:
    """Returns where a checkpoint of two log directories, optimizer state included, is not bit for bit the same."""
    ours, theirs = (Reader(Checkpoints(logdir).path(step)) for logdir in (found, expected))
    if ours.specs() != theirs.specs():
        return [f"checkpoint {step} holds other arrays"]
    unequal = [path for path in ours.specs() if ours.read(path).tobytes() != theirs.read(path).tobytes()]
    problems = [f"{len(unequal)} arrays of checkpoint {step} differ, the first is {unequal[0]}"] if unequal else []
    if ours.meta["data_state"] != theirs.meta["data_state"]:
        problems.append(f"checkpoint {step} has another position in the data")
    return problems


def _equal(ours: set[float], theirs: set[float]) -> bool:
    """Returns whether both sides reported a single value, however often, with the same bits."""
    return len(ours) == 1 == len(theirs) and np.array(list(ours)).tobytes() == np.array(list(theirs)).tobytes()
