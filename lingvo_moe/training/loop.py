"""The training loop: programs, data, checkpoints and curves, put together."""

from __future__ import annotations

import collections
import contextlib
import itertools
import pathlib
import time
from collections.abc import Sequence

from lingvo_moe import progress
from lingvo_moe.data.batching import Batch, padding
from lingvo_moe.data.pipeline import EvalInput, TrainInput
from lingvo_moe.engines.pjrt import Engine
from lingvo_moe.errors import UserError
from lingvo_moe.experiment import Experiment
from lingvo_moe.training.checkpoint import Checkpoints
from lingvo_moe.training.stopping import StopRequest
from lingvo_moe.training.summary import SummaryWriter


def train(name: str, experiment: Experiment, engine: Engine, logdir: str | pathlib.Path, say=print) -> dict[str, float]:
    """Trains to `experiment.training.steps`, from the newest checkpoint in `logdir` if there is one.

    SIGINT and SIGTERM end it after the step in progress, with a checkpoint, see `stopping`.

    Args:
      name: the registered name.
      experiment: what to train.
      engine: where; as many devices as `experiment.mesh`.
      logdir: for checkpoints and TensorBoard; created if absent.
      say: prints one line.

    Returns:
      The metrics of the last step, and `valid/cross_entropy` where it was measured at the end.

    Raises:
      UserError: data, tokenizer or checkpoint that do not fit the model, a loss that is not finite, a full disk.
    """
    return _Run(name, experiment, engine, pathlib.Path(logdir), say).train()


class _Run:
    """One call of `train`."""

    def __init__(self, name: str, experiment: Experiment, engine: Engine, logdir: pathlib.Path, say):
        self._name, self._experiment, self._engine, self._say = name, experiment, engine, say
        experiment.open_tokenizers()
        self._input = TrainInput(experiment.corpus, experiment.tokenizers, experiment.input)
        self._held_out = EvalInput(experiment.corpus, experiment.tokenizers, experiment.input, split="valid")
        if logdir.exists() and not logdir.is_dir():
            raise UserError(f"--logdir={logdir} is a file; expected a directory, or a name for a new one.")
        logdir.mkdir(parents=True, exist_ok=True)
        self._checkpoints = Checkpoints(logdir, experiment.training.keep)
        self._logdir = logdir
        self._stop = StopRequest(experiment.training.grace_seconds)

    def train(self) -> dict[str, float]:
        schedule, trained = self._experiment.training, self._checkpoints.latest() or 0
        if trained:
            self._checkpoints.require(self._name, self._experiment.steps.state_specs()["theta"])
        if trained >= schedule.steps:
            self._say(f"{self._name} has already been trained for {trained} steps; --steps={trained + 1000} would go on.")
            return {}
        self._compile()
        first, data_state = self._start()
        with (self._stop, contextlib.closing(self._checkpoints),
              contextlib.closing(SummaryWriter(self._logdir, "train")) as self._curves,
              contextlib.closing(SummaryWriter(self._logdir, "valid")) as self._valid_curves,
              progress.bar(f"training {self._name}", schedule.steps, "steps", done=first) as advance):
            step, metrics = self._loop(first, data_state, advance)
        if step < schedule.steps:
            self._say(f"stopped after step {step}, which is saved; the same command goes on from there.")
            raise KeyboardInterrupt
        return metrics

    def _compile(self):
        start = time.monotonic()
        devices = f"{len(self._engine.devices)} {self._engine.platform} device(s), mesh {self._experiment.mesh}"
        self._say(f"compiling {self._name}, {self._experiment.model.num_weights():,} weights, for {devices} ...")
        evaluates = self._experiment.training.evaluate_every > 0
        self._training = self._engine.training(self._experiment.steps, self._experiment.batch_specs(), evaluates)
        self._say(f"compiled in {time.monotonic() - start:.0f} s")

    def _start(self) -> tuple[int, object]:
        """Returns the steps made and the place in the data."""
        if self._checkpoints.latest() is not None:
            saved = self._checkpoints.restore(self._name, self._experiment.steps.state_specs(), self._training.shardings)
            self._say(f"going on from step {saved.step} ({self._checkpoints.directory})")
            self._training.load(saved.state)
            return saved.step, saved.data_state
        self._training.initialise(self._experiment.training.seed)
        return 0, None

    def _loop(self, first: int, data_state: object, advance) -> tuple[int, dict[str, float]]:
        """Returns the last step made, and its metrics."""
        schedule = self._experiment.training
        stream = self._input.batches(data_state)
        window = _Window()
        values: dict[str, float] = {}
        step, before = first, None
        while step < schedule.steps:
            batches, states = zip(*itertools.islice(stream, schedule.steps_at(step)))
            metrics, data_state = self._training.train(batches), states[-1]
            step += len(batches)
            self._check_skipped(step - len(batches), before)  # of the loop before: this one is under way meanwhile
            before = metrics
            window.add(batches)
            last = step == schedule.steps or self._stop.requested
            if step % schedule.log_every == 0 or last:
                values = self._report(step, metrics, window.values() | {"too_long": data_state["too_long"]})
                window = _Window()
            if step % schedule.checkpoint_every == 0 or last:
                self._checkpoints.save(self._name, self._training.state, data_state)
            if schedule.evaluate_every and (step % schedule.evaluate_every == 0 or step == schedule.steps):
                values.update(self._measure_held_out(step))
            advance(len(batches), note=_note(values))
            if last:
                break
        self._check_skipped(step, before)
        return step, values

    def _report(self, step: int, metrics: dict, of_input: dict[str, float]) -> dict[str, float]:
        values = {name: float(value) for name, value in metrics.items()} | of_input
        self._curves.write(step, values)
        return values

    def _check_skipped(self, step: int, metrics: dict | None):
        """Raises UserError once too many steps in a row, the last of them `step`, have changed nothing."""
        if metrics is None:
            return
        skipped, limit = int(metrics["skipped_in_a_row"]), self._experiment.training.max_skipped
        if skipped >= limit:
            raise UserError(f"the loss of step {step} is {float(metrics['loss'])}, its gradient's norm "
                            f"{float(metrics['gradient_norm'])}; {skipped} steps in a row changed no weight for such a reason "
                            f"(training.max_skipped={limit}). A lower --set optimizer.learning_rate.peak=... or a longer "
                            f"warmup_steps may help.")

    def _measure_held_out(self, step: int) -> dict[str, float]:
        """Cross-entropy per target token of the validation split, mean over `evaluation_batches` batches' tokens."""
        total = tokens = 0.0
        for count, batch in enumerate(self._held_out.batches()):
            if self._stop.requested:
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
        return {"tokens_per_second": self._tokens / max(time.monotonic() - self._start, 1e-9),
                **{f"padding/{side}": total / self._batches for side, total in self._padding.items()}}


def _note(values: dict[str, float]) -> str:
    shown = {"loss": "cross_entropy", "valid": "valid/cross_entropy", "overflow": "overflow", "tok/s": "tokens_per_second"}
    return " ".join(f"{label} {values[name]:.4g}" for label, name in shown.items() if name in values)
