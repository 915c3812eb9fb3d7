"""Handling of non-finite steps: training ends when too many in a row were skipped, and reports where numbers fail.

A step whose loss or gradient is not finite changes no weight (`steps.train_function`). One such step is harmless. Many
in a row mean that training cannot recover: the batch of the last one is saved and the step recomputed with summaries.
"""

from __future__ import annotations

import logging
import pathlib

import numpy as np

from lingvo_moe import tree
from lingvo_moe.data.batching import Batch
from lingvo_moe.errors import UserError
from lingvo_moe.lazy import tf
from lingvo_moe.training import replay
from lingvo_moe.training.callbacks import Callback, StepResult, TrainingRun
from lingvo_moe.training.checkpoint_errors import reason
from lingvo_moe.training.diagnosis import Diagnosis

_logger = logging.getLogger(__name__)


class NonFiniteGuard(Callback):
    """Ends training once `training.max_skipped` steps in a row were skipped.

    It reads the metrics of a step only when the next one has been started, so that the devices never wait for it. The
    next step may turn out to be finite; training ends only if it was skipped too, and so has not changed the weights.
    With `training.steps_per_loop`, the next result is of several steps, all of which must have been skipped.
    """

    def __init__(self):
        self._previous: StepResult | None = None

    def on_step(self, run: TrainingRun, result: StepResult):
        """Raises UserError if the steps before this one were skipped, and this one as well."""
        if self._previous is not None:
            _check(run, self._previous, result)
        self._previous = result

    def on_end(self, run: TrainingRun, result: StepResult):
        """Raises UserError if the last steps were skipped."""
        _check(run, result, result)


def _check(run: TrainingRun, result: StepResult, newest: StepResult):
    skipped = _skipped_in_a_row(result)
    since = 0 if newest is result else len(newest.batches)
    if skipped >= run.experiment.training.max_skipped and _skipped_in_a_row(newest) == skipped + since:
        raise _error(run, result, newest)


def _skipped_in_a_row(result: StepResult) -> int:
    return round(float(result.metrics["skipped_in_a_row"]))


def _error(run: TrainingRun, result: StepResult, newest: StepResult) -> UserError:
    """Saves a skipped step, recomputes it, and returns the error that ends training.

    Args:
      run: of which the weights are those that the step began with; steps skipped since have not changed them.
      result: the step.
      newest: the last step that was made, also skipped.
    """
    loss, norm = float(result.metrics["loss"]), float(result.metrics["gradient_norm"])
    problem = (
        f"the loss of step {result.step} is {loss}, its gradient's norm {norm}; {_skipped_in_a_row(result)} "
        f"consecutive updates were skipped as non-finite (training.max_skipped={run.experiment.training.max_skipped})"
    )
    path = replay.path_of(run.logdir, result.step)
    try:
        _save(run, result, newest, path)
    except UserError as error:
        return UserError(f"{problem}. What is needed to repeat that step could not be saved: {error}")
    return UserError(
        f"{problem}. {_summary(run, result)}. To look closer: python -m lingvo_moe diagnose "
        f"--logdir={run.logdir} --batch={path}. A lower --set optimizer.learning_rate.peak_value=... or a longer "
        f"warmup_steps may help."
    )


def _save(run: TrainingRun, result: StepResult, newest: StepResult, path: pathlib.Path):
    """Saves the step's batch, and a checkpoint of its weights unless the newest one holds them.

    Each restart would otherwise save the same weights again, and so delete one good checkpoint (`training.keep`). But
    where none is saved, a restart with the same settings draws the same batches again and stops at the same step;
    docs/faults.md has the remedies.
    """
    data_state = run.global_data_state(newest.data_state)
    now = int(np.asarray(run.training.state["step"]))
    try:
        saved = run.checkpoints.latest()
    except UserError:  # no checkpoint is valid; the weights in memory are
        saved = None
    checkpoint = now if saved is None or saved < now - _skipped_in_a_row(newest) else saved
    seed = tuple(np.asarray(run.training.state["seed"]).tolist())
    loss, gradient_norm = (float(result.metrics[metric]) for metric in ("loss", "gradient_norm"))
    rows = {name: (array.dtype.name, array.tolist()) for name, array in tree.flatten(result.batches[-1]).items()}
    parts = run.process_group.gather([run.training.rows.start, rows])
    run.process_group.broadcast(
        lambda: _save_replay(
            replay.Replay(run.name, result.step, seed, checkpoint, loss, gradient_norm, _global_batch(parts)), path
        )
    )
    if checkpoint != saved:
        run.checkpoints.save(run.name, run.training.state, data_state)
        run.checkpoints.wait()


def _save_replay(step: replay.Replay, path: pathlib.Path):
    try:
        step.save(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}.") from error


def _global_batch(parts: list) -> Batch:
    """Joins (first row, (dtype, rows) by path) of every process into a batch; equal first rows mean equal rows."""
    rows = dict(parts)
    batch = {}
    for path, (dtype, _) in parts[0][1].items():
        batch[path] = np.concatenate([np.array(rows[start][path][1], dtype) for start in sorted(rows)])
    return tree.unflatten(batch)


def _summary(run: TrainingRun, result: StepResult) -> str:
    """Recomputes the step with summaries; returns what they show, as a sentence without a full stop."""
    try:
        outputs = run.training.diagnose(result.batches[-1], result.step - 1)
        return f"Recomputed, {Diagnosis.of(outputs, run.experiment.model.weights()).summary()}"
    except (UserError, RuntimeError, MemoryError, tf.errors.OpError) as error:  # JAX's errors are RuntimeErrors
        # An engine refuses, or its devices have no memory for one more program.
        return f"It could not be recomputed ({reason(error)})"
    except Exception as error:  # the model's code may raise anything, which must not hide why training ended
        _logger.exception("the step could not be summarised:")
        return (
            f"It could not be summarised because of a defect of lingvo_moe or of a file that --import names "
            f"({reason(error)}); please report it, with the traceback above"
        )
