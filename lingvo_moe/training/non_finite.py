"""Training that came to nothing: what is kept of its last step, and where in the model the numbers ended."""

from __future__ import annotations

import pathlib
from typing import Any, NamedTuple

import numpy as np

from lingvo_moe import tree
from lingvo_moe.data.batching import Batch
from lingvo_moe.distributed.process_group import ProcessGroup
from lingvo_moe.engines.base import Metrics, Training
from lingvo_moe.errors import UserError
from lingvo_moe.experiment import Experiment
from lingvo_moe.training import replay
from lingvo_moe.training.checkpoint import Checkpoints
from lingvo_moe.training.checkpoint_reader import reason
from lingvo_moe.training.diagnosis import Diagnosis


class StepResult(NamedTuple):
    """A step that was made: its number, counted from 1, its batch (this process's rows), and its metrics, of which reading one
    waits for it."""

    step: int
    batch: Batch
    metrics: Metrics


def non_finite_error(
    name: str,
    experiment: Experiment,
    training: Training,
    checkpoints: Checkpoints,
    processes: ProcessGroup,
    data_state: Any,
    made: StepResult,
) -> UserError:
    """Keeps a step that was skipped like those before it, looks at it, and returns the error to end training with.

    Args:
      name: the registered name.
      experiment: what was trained.
      training: of which the weights are those that the step began with; steps skipped since do no harm.
      checkpoints: of the log directory, where the state is saved, and the batch beside them.
      processes: all of which call this.
      data_state: of the input pipeline, for the checkpoint.
      made: the step.
    """
    metrics = made.metrics
    loss, norm, skipped = float(metrics["loss"]), float(metrics["gradient_norm"]), int(metrics["skipped_in_a_row"])
    problem = (
        f"the loss of step {made.step} is {loss}, its gradient's norm {norm}; {skipped} steps in a row changed no weight "
        f"for such a reason (training.max_skipped={experiment.training.max_skipped})"
    )
    logdir = checkpoints.directory.parent
    path = replay.path_of(logdir, made.step)
    try:
        _keep(path, name, training, checkpoints, processes, data_state, made)
    except UserError as error:
        return UserError(f"{problem}. What is needed to make that step again could not be kept: {error}")
    return UserError(
        f"{problem}. Computed again, {_verdict(experiment, training, made)}. To look closer, with the same --set: "
        f"python -m lingvo_moe diagnose --model='{name}' --logdir={logdir} --batch={path}. A lower --set "
        f"optimizer.learning_rate.peak=... or a longer warmup_steps may help."
    )


def _keep(
    path: pathlib.Path,
    name: str,
    training: Training,
    checkpoints: Checkpoints,
    processes: ProcessGroup,
    data_state: Any,
    made: StepResult,
):
    checkpoints.wait()
    now = int(np.asarray(training.state["step"]))
    seed = tuple(np.asarray(training.state["seed"]).tolist())
    loss, gradient_norm = (float(made.metrics[metric]) for metric in ("loss", "gradient_norm"))
    parts = processes.gather(
        [training.rows.start, {path: rows.tolist() for path, rows in tree.flatten(made.batch).items()}]
    )
    processes.broadcast(
        lambda: _save(replay.Replay(name, made.step, seed, now, loss, gradient_norm, _whole(parts)), path)
    )
    if not processes.broadcast(lambda: now in checkpoints.steps()):
        checkpoints.save(name, training.state, data_state)
        checkpoints.wait()


def _save(step: replay.Replay, path: pathlib.Path):
    try:
        step.save(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}.") from error


def _whole(parts: list) -> Batch:
    """A batch of (first row, rows by path) of every process; those that hold the same rows hold the same."""
    rows = {start: leaves for start, leaves in parts}
    return tree.unflatten(
        {
            path: np.concatenate([np.array(rows[start][path], np.int32) for start in sorted(rows)])
            for path in parts[0][1]
        }
    )


def _verdict(experiment: Experiment, training: Training, made: StepResult) -> str:
    try:
        found = Diagnosis.of(training.diagnose(made.batch, made.step - 1), experiment.model.weights())
    except Exception as error:  # whatever the devices answer: often, that they have no room for one more program
        return f"it could not be: the devices answer {reason(error)}"
    return found.verdict()
