"""What was lost: checkpoints, steps, losses, weights. Each function returns a line for each thing that is not as it must be."""

from __future__ import annotations

import pathlib
from collections.abc import Collection, Mapping

import numpy as np

from lingvo_moe.training import checkpoint_tools
from lingvo_moe.training.checkpoint import Checkpoints
from lingvo_moe.training.checkpoint_reader import Reader

Curves = Mapping[str, Mapping[int, set[float]]]
# They tell of the machine, not of the model.
_OF_THE_MACHINE = {"tokens_per_second"}


def sound(logdir: pathlib.Path) -> list[int]:
    """The steps whose checkpoints are sound in every file and array, oldest first."""
    checkpoints = Checkpoints(logdir)
    return [step for step in checkpoints.steps() if not checkpoint_tools.verify(checkpoints, step)]


def missing_checkpoints(
    before: Collection[int], after: Collection[int], keep: int, damaged: Collection[int] = ()
) -> list[str]:
    """Checkpoints that were complete before a process ended and are not sound afterwards.

    Args:
      before, after: steps of complete and of sound checkpoints.
      keep: one that has so many newer sound ones has had its time.
      damaged: steps whose checkpoints were not sound when the process started.
    """
    return [
        f"checkpoint {step} was complete and is not sound any more"
        for step in sorted(before)
        if step not in {*after, *damaged} and sum(other > step for other in after) < keep
    ]


def missing_steps(reached: int, newest: int, most: int) -> list[str]:
    """Whether more than `most` steps lie between the newest checkpoint and the last step that was made."""
    lost = reached - newest
    return [f"{lost} steps were lost, {reached} were made, the newest checkpoint is {newest}"] if lost > most else []


def different_traces(found: Curves, expected: Curves, whole: bool = True) -> list[str]:
    """Where curves are not bit for bit those of the run that nothing happened to.

    Args:
      found, expected: by scalar and step, the values that were reported.
      whole: whether every step must be there.
    """
    problems = []
    for name in sorted((found.keys() | expected.keys()) - _OF_THE_MACHINE):
        ours, theirs = found.get(name, {}), expected.get(name, {})
        missing = sorted(theirs.keys() - ours.keys()) if whole else []
        unequal = [step for step in sorted(ours) if not _equal(ours[step], theirs.get(step, set()))]
        problems += [f"{name} lacks {len(missing)} steps, the first is {missing[0]}"] if missing else []
        problems += (
            [
                f"{name} differs in {len(unequal)} steps, the first is {unequal[0]}: {sorted(ours[unequal[0]])} instead of "
                f"{sorted(theirs.get(unequal[0], ()))}"
            ]
            if unequal
            else []
        )
    return problems


def different_weights(found: pathlib.Path, expected: pathlib.Path, step: int) -> list[str]:
    """Where a checkpoint of two log directories, optimizer and all, is not bit for bit the same."""
    ours, theirs = (Reader(Checkpoints(logdir).path(step)) for logdir in (found, expected))
    if ours.specs() != theirs.specs():
        return [f"checkpoint {step} holds other arrays"]
    unequal = [path for path in ours.specs() if ours.read(path).tobytes() != theirs.read(path).tobytes()]
    problems = [f"{len(unequal)} arrays of checkpoint {step} differ, the first is {unequal[0]}"] if unequal else []
    if ours.meta["data_state"] != theirs.meta["data_state"]:
        problems.append(f"checkpoint {step} goes on at another place in the data")
    return problems


def _equal(ours: set[float], theirs: set[float]) -> bool:
    """Whether one value was reported, however often, and it has the same bits."""
    return len(ours) == 1 == len(theirs) and np.array(list(ours)).tobytes() == np.array(list(theirs)).tobytes()
