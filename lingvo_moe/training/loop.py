"""The training loop.

`train` restores or initialises the training state, then makes steps until the schedule is complete or the process is
asked to stop. Everything else that happens during training is a callback (`training.callbacks`).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import pathlib
import tempfile
import time
import types
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from lingvo_moe import overrides
from lingvo_moe.data.batching import Batch
from lingvo_moe.data.pipeline import EvalInput, State, TrainInput
from lingvo_moe.distributed.process_group import ProcessGroup
from lingvo_moe.engines.base import Engine, Training
from lingvo_moe.errors import UserError
from lingvo_moe.experiment import Experiment
from lingvo_moe.optimizers.schedules import InverseSquareRoot
from lingvo_moe.training import hyperparameters, logdir_lock
from lingvo_moe.training.callbacks import Callback, StepResult, TrainingRun, registered_callbacks
from lingvo_moe.training.checkpoint import Checkpoints
from lingvo_moe.training.non_finite import NonFiniteGuard
from lingvo_moe.training.preemption import PreemptionGuard
from lingvo_moe.training.readers import same_readers
from lingvo_moe.training.standard_callbacks import Checkpointer, HeldOutEvaluator, ProgressBar, Reporter

_log = logging.getLogger(__name__)


def train(
    name: str,
    experiment: Experiment,
    engine: Engine,
    logdir: str | pathlib.Path,
    process_group: ProcessGroup = ProcessGroup(),
    callbacks: Sequence[Callback] = (),
    initial_weights: str | pathlib.Path | None = None,
    initial_values: Mapping[str, np.ndarray] = types.MappingProxyType({}),
) -> dict[str, float]:
    """Trains to `experiment.training.steps`; resumes from the newest checkpoint in `logdir` if there is one.

    SIGINT and SIGTERM end training after the step in progress, with a checkpoint (`training.preemption`). With several
    processes each computes the rows of a batch that its devices hold and writes their shards of a checkpoint; the
    primary process writes the curves and logs for all.

    Args:
      name: the registered name.
      experiment: what to train.
      engine: where to train; it has as many devices as `experiment.mesh`.
      logdir: the directory of checkpoints and curves; created if absent.
      process_group: the processes that train together; all call this function.
      callbacks: called after the standard and the registered ones.
      initial_weights: the log directory of other training, whose newest weights a new training starts with, at step 0
        and with a new optimizer state (fine-tuning); None for random weights. Without effect once `logdir` has a
        checkpoint.
      initial_values: weights by path, which new training starts with instead of random ones.

    Returns:
      The metrics of the last step, with `valid/cross_entropy` if it was computed at the end. Empty if training was
      complete already.

    Raises:
      UserError: data, tokenizer or checkpoint do not fit the model, too many steps in a row were not finite, the
        disk is full, or another process trains in `logdir`.
      KeyboardInterrupt: training was asked to stop, and has saved a checkpoint.
    """
    logdir, schedule = pathlib.Path(logdir), experiment.training
    train_input, held_out = _open_data(experiment)
    _check_processes(name, experiment, train_input, logdir, process_group, initial_weights, initial_values)
    with contextlib.ExitStack() as stack:
        process_group.broadcast(lambda: stack.enter_context(logdir_lock.locked(logdir)))
        checkpoints, initial, trained = _open_checkpoints(
            name, experiment, train_input, logdir, process_group, initial_weights
        )
        if trained >= schedule.steps:
            _log.info(f"{name} has already been trained for {trained} steps; --steps={trained + 1000} would continue.")
            process_group.finish()
            return {}
        _log_cooldown(experiment)
        training = _compile(name, experiment, engine, process_group)
        first_step, data_state = _restore_or_initialise(
            name, experiment, training, checkpoints, initial, initial_values
        )
        process_group.barrier()
        batches = train_input.batches(data_state, experiment.input.shards_of_rows(training.rows))
        # Not earlier: settings that cannot be compiled or read are not those of this directory.
        process_group.broadcast(lambda: hyperparameters.save(logdir, hyperparameters.of(name, experiment)))
        preemption = PreemptionGuard(schedule.grace_seconds, not process_group.catches_sigterm)
        run = TrainingRun(name, experiment, training, checkpoints, process_group, preemption, logdir, first_step)
        standard = [NonFiniteGuard(), Reporter(), Checkpointer(), HeldOutEvaluator(held_out), ProgressBar()]
        with preemption, contextlib.closing(checkpoints):
            step = _make_steps(run, batches, [*standard, *registered_callbacks(), *callbacks])
        process_group.finish()
        if step < schedule.steps:
            _log.info(f"stopped after step {step}, which is saved; the same command resumes from there.")
            raise KeyboardInterrupt
        return run.scalars


def _open_data(experiment: Experiment) -> tuple[TrainInput, EvalInput]:
    """Opens the training and the validation split."""
    experiment.check_tokenizers()
    directories = experiment.corpus, experiment.tokenizers
    return TrainInput(*directories, experiment.input), EvalInput(*directories, experiment.input, split="valid")


def _open_checkpoints(
    name: str,
    experiment: Experiment,
    train_input: TrainInput,
    logdir: pathlib.Path,
    process_group: ProcessGroup,
    initial_weights: str | pathlib.Path | None,
) -> tuple[Checkpoints, Checkpoints | None, int]:
    """Opens the checkpoints of `logdir` and of the initial weights, and returns them with the newest step or 0.

    Raises:
      UserError: those that training starts with are of another model, or were trained with other tokenizers or data.
    """
    checkpoints = Checkpoints(logdir, experiment.training.keep, process_group)
    initial = None if initial_weights is None else Checkpoints(initial_weights, processes=process_group)
    trained = checkpoints.latest() or 0
    specs = experiment.steps.state_specs()
    if trained:
        checkpoints.require_state(name, specs)
        state = checkpoints.data_state(trained) if trained < experiment.training.steps else None
        if state is not None:
            train_input.check(state)
    elif initial is not None:
        readers = initial.readers(initial.require(name, specs["theta"]))
        if not same_readers(experiment, readers):
            raise UserError(
                f"--initial_weights={initial.directory.parent}: trained with other tokenizers than "
                f"--tokenizers={experiment.tokenizers}. Pass those, or make a file of the weights (`checkpoint convert "
                f"--output`) and name theirs with --initial_tokenizers."
            )
    return checkpoints, initial, trained


def _check_processes(
    name: str,
    experiment: Experiment,
    train_input: TrainInput,
    logdir: pathlib.Path,
    process_group: ProcessGroup,
    initial_weights: str | pathlib.Path | None,
    initial_values: Mapping[str, np.ndarray],
):
    """Raises UserError if processes have other settings or data, or if one of them cannot use the log directory."""
    given = {"data": train_input.stream_id, "--initial_weights": str(initial_weights)}
    process_group.require_same({**given, **_settings(name, experiment)})
    process_group.broadcast(lambda: _require_writable(logdir))
    process_group.require_shared(logdir)
    # Not earlier: in a log directory that is not shared, one process may resume, without initial values.
    values = {
        f"the initial {path}": hashlib.sha256(value.tobytes()).hexdigest() for path, value in initial_values.items()
    }
    process_group.require_same(values)


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
    taken, states = zip(*itertools.islice(batches, schedule.steps_at(step)))
    metrics = run.training.train(taken)
    step += len(taken)
    return StepResult(step, taken, metrics, states[-1], last=step == schedule.steps or run.should_stop())


@contextlib.contextmanager
def _started(run: TrainingRun, callbacks: Sequence[Callback]) -> Iterator[None]:
    """Calls `on_start` of each callback, and on exit `on_close` of each that was started, in reverse order."""
    with contextlib.ExitStack() as stack:
        for callback in callbacks:
            callback.on_start(run)
            stack.push(lambda kind, error, traceback, callback=callback: callback.on_close(error))
        yield


def _log_cooldown(experiment: Experiment):
    """Says so where training ends before the learning rate's cool-down, which the user may expect, begins."""
    rate, steps = experiment.optimizer.learning_rate, experiment.training.steps
    if isinstance(rate, InverseSquareRoot) and rate.cooldown_steps and steps <= rate.cooldown_after:
        _log.info(
            f"training ends at step {steps}, before the learning rate's cool-down, which begins after step "
            f"{rate.cooldown_after}; for one that ends with training: "
            f"--set=optimizer.learning_rate.cooldown_after={steps // 2} "
            f"--set=optimizer.learning_rate.cooldown_steps={steps - steps // 2}"
        )


def _compile(name: str, experiment: Experiment, engine: Engine, process_group: ProcessGroup) -> Training:
    start = time.monotonic()
    devices = f"{len(engine.devices)} {engine.platform} device(s), mesh {experiment.mesh}"
    _log.info(f"compiling {name}, {experiment.model.num_weights():,} weights, for {devices} ...")
    training = engine.training(experiment.steps, experiment.batch_specs(), experiment.training.evaluate_every > 0)
    # The first collective between two processes fails if one of them arrives half a minute after the other.
    process_group.barrier()
    _log.info(f"compiled in {time.monotonic() - start:.0f} s")
    return training


def _restore_or_initialise(
    name: str,
    experiment: Experiment,
    training: Training,
    checkpoints: Checkpoints,
    initial: Checkpoints | None,
    initial_values: Mapping[str, np.ndarray],
) -> tuple[int, State | None]:
    """Loads the newest checkpoint, or creates the initial state, with the weights of `initial` and `initial_values`.

    Returns:
      (the steps made, the state of the input).
    """
    if checkpoints.latest() is None:
        training.initialise(experiment.training.seed)
        if initial is not None:
            specs = experiment.steps.state_specs()["theta"]
            shardings = None if training.shardings is None else training.shardings["theta"]
            step, _ = initial.restore_theta(name, specs, shardings, load=training.load_weights)
            initial.close()
            _log.info(f"starting with the weights of step {step} ({initial.directory})")
        for path, value in initial_values.items():
            training.set_weight(path, value)
        return 0, None
    saved = checkpoints.restore(name, experiment.steps.state_specs(), training.shardings, training.load)
    _log.info(f"resuming from step {saved.step} ({checkpoints.directory})")
    return saved.step, saved.data_state


def _settings(name: str, experiment: Experiment) -> dict[str, str]:
    """Returns all settings that processes must agree on; the directories of the data may differ between machines."""
    fields = {path: str(value) for path, value in overrides.fields(experiment) if path not in ("corpus", "tokenizers")}
    return {"model": name, **fields}


def _require_writable(logdir: pathlib.Path):
    """Makes the directory; raises UserError if it cannot be written to, before a compiler has run for minutes."""
    if logdir.exists() and not logdir.is_dir():
        raise UserError(f"--logdir={logdir} is a file; expected a directory, or a name for a new one.")
    try:
        logdir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=logdir) as file:
            file.write(bytes(4096))
    except OSError as error:
        raise UserError(
            f"--logdir={logdir}: nothing can be written there ({error.strerror}); checkpoints and curves would be "
            f"lost. Free some space or pass another directory."
        ) from None
