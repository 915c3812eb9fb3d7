"""The training loop.

`train` restores or initialises the training state, then makes steps until the schedule is complete or the process is
asked to stop. Everything else that happens during training is a callback (`training.callbacks`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import pathlib
import types
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from lingvo_moe.data.batching import Batch
from lingvo_moe.data.pipeline import EvalInput, State, TrainInput
from lingvo_moe.distributed.process_group import ProcessGroup
from lingvo_moe.engines.base import Engine, Training
from lingvo_moe.experiment import Experiment
from lingvo_moe.optimizers.schedules import InverseSquareRoot
from lingvo_moe.training import compiling, hyperparameters, logdir_lock
from lingvo_moe.training.callbacks import Callback, StepResult, TrainingRun, check_callback, registered_callbacks
from lingvo_moe.training.non_finite import NonFiniteGuard
from lingvo_moe.training.preemption import PreemptionGuard
from lingvo_moe.training.standard_callbacks import Checkpointer, HeldOutEvaluator, ProgressBar, Reporter
from lingvo_moe.training.start import Start, StartCheckpoints
from lingvo_moe.utils.counts import counted

_logger = logging.getLogger(__name__)


def train(
    name: str,
    experiment: Experiment,
    engine: Engine,
    logdir: str | pathlib.Path,
    process_group: ProcessGroup | None = None,
    callbacks: Sequence[Callback] = (),
    initial_weights: str | pathlib.Path | None = None,
    initial_values: Mapping[str, np.ndarray] = types.MappingProxyType({}),
) -> dict[str, float]:
    """Trains to `experiment.training.steps`; resumes from the newest checkpoint in `logdir` if there is one.

    SIGINT, SIGTERM and SIGHUP end training after the step in progress, with a checkpoint (`training.preemption`). With
    several processes each computes the rows of a batch that its devices hold and writes their shards of a checkpoint;
    the primary process writes the curves and logs for all.

    Args:
      name: the registered name.
      experiment: what to train.
      engine: where to train; it has as many devices as `experiment.mesh`.
      logdir: the directory of checkpoints and curves; created if absent.
      process_group: the processes that train together; all call this function. None for this process alone.
      callbacks: called after the standard and the registered ones.
      initial_weights: the log directory of other training, whose newest weights a new training starts with, at step 0
        and with a new optimizer state (fine-tuning); None for random weights. Without effect once `logdir` has a
        checkpoint.
      initial_values: weights by path, which new training starts with instead of random ones.

    Returns:
      The metrics of the last step, with `valid/cross_entropy` if it was computed at the end. Empty if training was
      complete already.

    Raises:
      UserError: data, tokenizer, checkpoint or initial values do not fit the model, a callback lacks a hook, too
        many steps in a row were not finite, the disk is full, or another process trains in `logdir`.
      KeyboardInterrupt: training was asked to stop, and has saved a checkpoint.
    """
    process_group = process_group or ProcessGroup()
    start = Start(name, experiment, pathlib.Path(logdir), process_group, initial_weights, initial_values)
    train_input, held_out = start.open_data()
    start.check_processes(train_input)
    steps = experiment.training.steps
    with contextlib.ExitStack() as stack:
        process_group.broadcast(lambda: stack.enter_context(logdir_lock.locked(start.logdir)))
        checkpoints = stack.enter_context(start.open_checkpoints(train_input))
        if checkpoints.trained is not None and checkpoints.trained >= steps:
            _logger.info(
                "%s has already been trained for %s; --steps=%d would continue.",
                name,
                counted(checkpoints.trained, "step"),
                checkpoints.trained + 1000,
            )
            process_group.finish()
            return {}
        step, scalars = _train(start, checkpoints, train_input, engine, _all_callbacks(held_out, callbacks))
        process_group.finish()
        if step < steps:
            _logger.info("stopped after step %d, which is saved; the same command resumes from there.", step)
            raise KeyboardInterrupt
        return scalars


def _all_callbacks(held_out: EvalInput, callbacks: Sequence[Callback]) -> list[Callback]:
    """Returns the standard callbacks, the registered ones and these; raises UserError for what is no callback."""
    for callback in callbacks:
        check_callback("a callback", callback)
    standard = [NonFiniteGuard(), Reporter(), Checkpointer(), HeldOutEvaluator(held_out), ProgressBar()]
    return [*standard, *registered_callbacks(), *callbacks]


def _train(
    start: Start, checkpoints: StartCheckpoints, train_input: TrainInput, engine: Engine, callbacks: Sequence[Callback]
) -> tuple[int, dict[str, float]]:
    """Compiles, loads the state and makes steps; returns the number of the last step and its metrics."""
    experiment, process_group = start.experiment, start.process_group
    _log_cooldown(experiment)
    training = _compile(start.name, experiment, engine, process_group)
    first_step, data_state = start.load_state(training, checkpoints)
    process_group.barrier()
    batches = train_input.batches(data_state, experiment.input.shards_of_rows(training.rows))
    # Not earlier: settings that cannot be compiled or read are not those of this directory.
    process_group.broadcast(lambda: hyperparameters.save(start.logdir, hyperparameters.of(start.name, experiment)))
    preemption = PreemptionGuard(experiment.training.grace_seconds, not process_group.catches_sigterm)
    run = TrainingRun(
        start.name, experiment, training, checkpoints.own, process_group, preemption, start.logdir, first_step
    )
    with preemption, contextlib.closing(checkpoints.own):
        return _make_steps(run, batches, callbacks), run.scalars


def _make_steps(run: TrainingRun, batches: Iterator[tuple[Batch, State]], callbacks: Sequence[Callback]) -> int:
    """Makes steps until the schedule is complete or a process is asked to stop; returns the number of the last one."""
    with _started(run, callbacks):
        result = _step(run, batches, run.first_step)
        while True:
            for callback in callbacks:
                callback.on_step(run, result)
            if result.last:
                break
            result = _step(run, batches, result.step)
        for callback in callbacks:
            callback.on_end(run, result)
    return result.step


def _step(run: TrainingRun, batches: Iterator[tuple[Batch, State]], step: int) -> StepResult:
    """Calls the engine once, after `step` steps."""
    schedule = run.experiment.training
    taken, states = zip(*itertools.islice(batches, schedule.steps_of_next_call(step)))
    metrics = run.training.train(taken)
    step += len(taken)
    return StepResult(step, taken, metrics, states[-1], last=step == schedule.steps or run.should_stop())


@contextlib.contextmanager
def _started(run: TrainingRun, callbacks: Sequence[Callback]) -> Iterator[None]:
    """Calls `on_start` of each callback, and on exit `on_close` of each that was started, in reverse order."""
    with contextlib.ExitStack() as stack:
        for callback in callbacks:
            callback.on_start(run)
            stack.push(functools.partial(_close, callback))
        yield


def _close(callback: Callback, kind: type[BaseException] | None, error: BaseException | None, traceback):
    """An exit function that never suppresses the error, whatever `on_close` returns."""
    callback.on_close(error)


def _log_cooldown(experiment: Experiment):
    """Says so where training ends before the learning rate's cool-down, which the user may expect, begins."""
    rate, steps = experiment.optimizer.learning_rate, experiment.training.steps
    if isinstance(rate, InverseSquareRoot) and rate.cooldown_steps and steps <= rate.cooldown_after:
        _logger.info(
            "training ends at step %d, before the learning rate's cool-down, which begins after step %d; for one that "
            "ends with training: --set=optimizer.learning_rate.cooldown_after=%d "
            "--set=optimizer.learning_rate.cooldown_steps=%d",
            steps,
            rate.cooldown_after,
            steps // 2,
            steps - steps // 2,
        )


def _compile(name: str, experiment: Experiment, engine: Engine, process_group: ProcessGroup) -> Training:
    with compiling.announced(name, experiment, engine.platform):
        training = engine.training(experiment.steps, experiment.batch_specs(), experiment.training.evaluate_every > 0)
        # The first collective between two processes fails if one of them arrives half a minute after the other.
        process_group.barrier()
    return training
