"""The training loop: programs, data, checkpoints and curves, put together."""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import pathlib
import tempfile
import time
from collections.abc import Sequence

from lingvo_moe import overrides
from lingvo_moe.data.batching import Batch, padding
from lingvo_moe.data.pipeline import EvalInput, State, TrainInput, merge, too_long
from lingvo_moe.distributed.process_group import ProcessGroup
from lingvo_moe.engines.base import Engine, Metrics
from lingvo_moe.errors import UserError
from lingvo_moe.experiment import Experiment
from lingvo_moe.training.checkpoint import Checkpoints
from lingvo_moe.training.non_finite import StepResult, non_finite_error
from lingvo_moe.training.preemption import PreemptionGuard
from lingvo_moe.training.summary import NoWriter, SummaryWriter
from lingvo_moe.utils import progress

_log = logging.getLogger(__name__)


def train(
    name: str,
    experiment: Experiment,
    engine: Engine,
    logdir: str | pathlib.Path,
    processes: ProcessGroup | None = None,
) -> dict[str, float]:
    """Trains to `experiment.training.steps`, from the newest checkpoint in `logdir` if there is one.

    SIGINT and SIGTERM end it after the step in progress, with a checkpoint, see `stopping`. Of many processes the first one
    speaks and writes the curves; each makes the part of a batch that its devices hold, and writes their part of a checkpoint.

    Args:
      name: the registered name.
      experiment: what to train.
      engine: where; as many devices as `experiment.mesh`.
      logdir: for checkpoints and TensorBoard; created if absent.
      processes: that train it together; all call this.

    Returns:
      The metrics of the last step, and `valid/cross_entropy` where it was measured at the end.

    Raises:
      UserError: data, tokenizer or checkpoint that do not fit the model, a loss that stays not finite (see `post_mortem`), a
        full disk.
    """
    return _Run(name, experiment, engine, pathlib.Path(logdir), processes or ProcessGroup()).train()


class _Run:
    """One call of `train`."""

    def __init__(
        self, name: str, experiment: Experiment, engine: Engine, logdir: pathlib.Path, processes: ProcessGroup
    ):
        self._name, self._experiment, self._engine, self._process_group = name, experiment, engine, processes
        experiment.open_tokenizers()
        self._input = TrainInput(experiment.corpus, experiment.tokenizers, experiment.input)
        self._held_out = EvalInput(experiment.corpus, experiment.tokenizers, experiment.input, split="valid")
        processes.require_same({"data": self._input.stream_id, **_settings(name, experiment)})
        processes.broadcast(lambda: _require_writable(logdir))
        processes.require_shared(logdir)
        self._checkpoints = Checkpoints(logdir, experiment.training.keep, processes)
        self._logdir = logdir
        self._stop = PreemptionGuard(experiment.training.grace_seconds)

    def train(self) -> dict[str, float]:
        schedule, trained = self._experiment.training, self._checkpoints.latest() or 0
        if trained:
            self._checkpoints.require(self._name, self._experiment.steps.state_specs()["theta"])
        if trained >= schedule.steps:
            _log.info(
                f"{self._name} has already been trained for {trained} steps; --steps={trained + 1000} would go on."
            )
            self._process_group.finish()
            return {}
        self._compile()
        first, data_state = self._start()
        self._process_group.barrier()
        shown = self._process_group.is_primary
        with (
            self._stop,
            contextlib.closing(self._checkpoints),
            contextlib.closing(self._writer("train")) as self._curves,
            contextlib.closing(self._writer("valid")) as self._valid_curves,
            progress.bar(f"training {self._name}", schedule.steps, "steps", done=first, shown=shown) as advance,
        ):
            step, metrics = self._loop(first, data_state, advance)
        self._process_group.finish()
        if step < schedule.steps:
            _log.info(f"stopped after step {step}, which is saved; the same command goes on from there.")
            raise KeyboardInterrupt
        return metrics

    def _writer(self, curves: str) -> SummaryWriter:
        return SummaryWriter(self._logdir, curves) if self._process_group.is_primary else NoWriter()

    def _compile(self):
        start = time.monotonic()
        devices = f"{len(self._engine.devices)} {self._engine.platform} device(s), mesh {self._experiment.mesh}"
        _log.info(f"compiling {self._name}, {self._experiment.model.num_weights():,} weights, for {devices} ...")
        evaluates = self._experiment.training.evaluate_every > 0
        self._training = self._engine.training(self._experiment.steps, self._experiment.batch_specs(), evaluates)
        self._process_group.barrier()  # the first exchange between two of them fails where one comes half a minute later
        _log.info(f"compiled in {time.monotonic() - start:.0f} s")

    def _start(self) -> tuple[int, object]:
        """Returns the steps made and the place in the data."""
        if self._checkpoints.latest() is not None:
            saved = self._checkpoints.restore(
                self._name, self._experiment.steps.state_specs(), self._training.shardings
            )
            _log.info(f"going on from step {saved.step} ({self._checkpoints.directory})")
            self._training.load(saved.state)
            return saved.step, saved.data_state
        self._training.initialise(self._experiment.training.seed)
        return 0, None

    def _loop(self, first: int, data_state: object, advance) -> tuple[int, dict[str, float]]:
        """Returns the last step made, and its metrics."""
        schedule = self._experiment.training
        stream = self._input.batches(data_state, self._experiment.input.shards_of(self._training.rows))
        window = _Window()
        values: dict[str, float] = {}
        step, before = first, None
        while step < schedule.steps:
            batches, states = zip(*itertools.islice(stream, schedule.steps_at(step)))
            metrics, data_state = self._training.train(batches), states[-1]
            step += len(batches)
            made = StepResult(step, batches[-1], metrics)
            self._check_skipped(before, made, data_state)  # of the loop before: this one is under way meanwhile
            before = made
            window.add(batches)
            last = step == schedule.steps or self._stops()
            if step % schedule.log_every == 0 or last:
                values = self._report(step, metrics, window, data_state)
                window = _Window()
            if step % schedule.checkpoint_every == 0 or last:
                self._checkpoints.save(self._name, self._training.state, self._whole(data_state))
            if schedule.evaluate_every and (step % schedule.evaluate_every == 0 or step == schedule.steps):
                values.update(self._evaluate_held_out(step))
            advance(len(batches), note=_note(values))
            if last:
                break
        self._check_skipped(before, before, data_state)
        return step, values

    def _stops(self) -> bool:
        """Whether one of the processes was asked to stop: all do, after the same step."""
        return self._process_group.any(self._stop.requested)

    def _whole(self, data_state: State) -> State:
        """Of all processes, in the first."""
        return merge(self._process_group.gather(data_state))

    def _report(self, step: int, metrics: Metrics, window: _Window, data_state: State) -> dict[str, float]:
        counted = window.values() | {"too_long": too_long(data_state)}
        of_input = _of_all(
            self._process_group.gather(counted), self._experiment.input.batch_size / len(self._training.rows)
        )
        values = {name: float(value) for name, value in metrics.items()} | of_input
        self._curves.write(step, values)
        return values

    def _check_skipped(self, before: StepResult | None, newest: StepResult | None, data_state: State):
        """Raises UserError once too many steps in a row, up to that of `before`, have changed nothing, and `newest`, which was
        begun meanwhile, has not ended that: then the weights are still those that `before` began with."""
        limit = self._experiment.training.max_skipped
        if before is not None and all(int(made.metrics["skipped_in_a_row"]) >= limit for made in (before, newest)):
            raise non_finite_error(
                self._name,
                self._experiment,
                self._training,
                self._checkpoints,
                self._process_group,
                self._whole(data_state),
                before,
            )

    def _evaluate_held_out(self, step: int) -> dict[str, float]:
        """Cross-entropy per target token of the validation split, mean over `evaluation_batches` batches' tokens."""
        total = tokens = 0.0
        for count, batch in enumerate(self._held_out.batches()):
            if self._stops():
                return {}
            if count == self._experiment.training.evaluation_batches:
                break
            metrics = self._training.evaluate(batch)
            total += float(metrics["cross_entropy"]) * float(metrics["tokens"])
            tokens += float(metrics["tokens"])
        if not tokens:
            return {}
        self._valid_curves.write(step, {"cross_entropy": total / tokens})
        return {"valid/cross_entropy": total / tokens}


def _settings(name: str, experiment: Experiment) -> dict[str, str]:
    """Of all that processes must agree on; where the data lies on its machine is each one's own affair."""
    fields = {path: str(value) for path, value in overrides.fields(experiment) if path not in ("corpus", "tokenizers")}
    return {"model": name, **fields}


def _require_writable(logdir: pathlib.Path):
    """Makes the directory; raises UserError where nothing can be written there, before a compiler has worked for minutes."""
    if logdir.exists() and not logdir.is_dir():
        raise UserError(f"--logdir={logdir} is a file; expected a directory, or a name for a new one.")
    try:
        logdir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=logdir) as file:
            file.write(bytes(4096))
    except OSError as error:
        raise UserError(
            f"--logdir={logdir}: nothing can be written there ({error.strerror}); checkpoints and curves would be "
            f"lost. Make room or pass another."
        ) from None


class _Window:
    """Speed and padding since the last report."""

    def __init__(self):
        self._start, self._batches, self._tokens = time.monotonic(), 0, 0
        self._padding: dict[str, float] = collections.defaultdict(float)

    def add(self, batches: Sequence[Batch]):
        self._batches += len(batches)
        for batch in batches:
            for side, share in padding(batch).items():
                self._padding[side] += share
                self._tokens += round((1.0 - share) * batch[side]["segment_ids"].size)

    def values(self) -> dict[str, float]:
        """`tokens_per_second`, of both sides without padding, and for each side the share of positions that are padding."""
        return {
            "tokens_per_second": self._tokens / max(time.monotonic() - self._start, 1e-9),
            **{f"padding/{side}": total / self._batches for side, total in self._padding.items()},
        }


def _of_all(counted: list[dict[str, float]], parts: float) -> dict[str, float]:
    """What each of some processes has counted, of a whole batch: `parts` times as many rows as each of them makes."""
    means = {name: sum(values[name] for values in counted) / len(counted) for name in counted[0]}
    return means | {name: means[name] * parts for name in ("tokens_per_second", "too_long")}


def _note(values: dict[str, float]) -> str:
    shown = {
        "loss": "cross_entropy",
        "valid": "valid/cross_entropy",
        "overflow": "overflow",
        "tok/s": "tokens_per_second",
    }
    return " ".join(f"{label} {values[name]:.4g}" for label, name in shown.items() if name in values)
