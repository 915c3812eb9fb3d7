"""The training loop: programs, data, checkpoints and curves, put together."""

from __future__ import annotations

import collections
import contextlib
import math
import os
import pathlib
import signal
import time
from collections.abc import Iterator

import numpy as np

from lingvo_moe import progress
from lingvo_moe.data.batching import Batch, padding
from lingvo_moe.data.pipeline import EvalInput, TrainInput
from lingvo_moe.engines.pjrt import Engine
from lingvo_moe.errors import UserError
from lingvo_moe.experiment import Experiment
from lingvo_moe.training.checkpoint import Checkpoints
from lingvo_moe.training.summary import SummaryWriter


def train(name: str, experiment: Experiment, engine: Engine, logdir: str | pathlib.Path, say=print) -> dict[str, float]:
    """Trains to `experiment.training.steps`, from the newest checkpoint in `logdir` if there is one.

    SIGINT and SIGTERM end it after the step in progress, with a checkpoint; a second SIGINT ends it at once.

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
        self._stop = False

    def train(self) -> dict[str, float]:
        schedule, trained = self._experiment.training, self._checkpoints.latest() or 0
        if trained:
            self._checkpoints.require(self._name, self._experiment.steps.state_specs()["theta"])
        if trained >= schedule.steps:
            self._say(f"{self._name} has already been trained for {trained} steps; --steps={trained + 1000} would go on.")
            return {}
        self._compile()
        state, data_state = self._start()
        first = int(state["step"])
        self._curves, self._valid_curves = (SummaryWriter(self._logdir, run) for run in ("train", "valid"))
        with self._stopping_on_signals(), progress.bar(
                f"training {self._name}", schedule.steps, "steps", done=first) as advance:
            step, metrics = self._loop(state, data_state, first, advance)
            self._checkpoints.close()
            self._curves.close()
            self._valid_curves.close()
            if step < schedule.steps:
                raise KeyboardInterrupt
        return metrics

    def _compile(self):
        start = time.monotonic()
        steps, specs = self._experiment.steps, self._experiment.batch_specs()
        devices = f"{len(self._engine.devices)} {self._engine.platform} device(s), mesh {self._experiment.mesh}"
        self._say(f"compiling {self._name}, {self._experiment.model.num_weights():,} weights, for {devices} ...")
        self._steps = steps
        self._train_step = self._engine.load(steps.train(specs))
        self._evaluate = self._engine.load(steps.evaluate(specs)) if self._experiment.training.evaluate_every else None
        self._say(f"compiled in {time.monotonic() - start:.0f} s")

    def _start(self) -> tuple[dict, object]:
        if self._checkpoints.latest() is not None:
            saved = self._checkpoints.restore(self._name, self._steps.state_specs(), self._train_step.shardings("state"))
            self._say(f"going on from step {saved.step} ({self._checkpoints.directory})")
            return saved.state, saved.data_state
        seed = np.array([0, self._experiment.training.seed], np.int32)
        return self._engine.load(self._steps.init())({"seed": seed})["state"], None

    def _loop(self, state: dict, data_state: object, first: int, advance) -> tuple[int, dict[str, float]]:
        """Returns the last step made, and its metrics."""
        schedule = self._experiment.training
        batches = self._input.batches(data_state)
        window = _Window()
        values: dict[str, float] = {}
        for step in range(first + 1, schedule.steps + 1):
            batch, data_state = next(batches)
            outputs = self._train_step({"state": state, "batch": batch})
            state = outputs["state"]
            window.add(batch)
            last = step == schedule.steps or self._stop
            if step % schedule.log_every == 0 or last:
                values = self._report(step, outputs["metrics"], window.values() | {"too_long": data_state["too_long"]})
                window = _Window()
            if self._evaluate and (step % schedule.evaluate_every == 0 or last):
                values.update(self._measure_held_out(step, state["theta"]))
            if step % schedule.checkpoint_every == 0 or last:
                self._check_finite(step, outputs["metrics"])
                self._checkpoints.save(self._name, state, data_state)
            advance(note=_note(values))
            if last:
                break
        return step, values

    def _report(self, step: int, metrics: dict, of_input: dict[str, float]) -> dict[str, float]:
        self._check_finite(step, metrics)
        values = {name: float(value) for name, value in metrics.items()} | of_input
        self._curves.write(step, values)
        return values

    def _check_finite(self, step: int, metrics: dict):
        """Raises UserError once the weights are lost: a gradient that is not finite has spoilt them all."""
        loss, norm = float(metrics["loss"]), float(metrics["gradient_norm"])
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise UserError(f"the loss of step {step} is {loss}, its gradient's norm {norm}; checkpoints in "
                            f"{self._checkpoints.directory} are from before. A lower --set optimizer.learning_rate.peak=... or "
                            f"a longer warmup_steps may help.")

    def _measure_held_out(self, step: int, theta: dict) -> dict[str, float]:
        """Cross-entropy per target token of the validation split, mean over `evaluation_batches` batches' tokens."""
        total = tokens = 0.0
        for count, batch in enumerate(self._held_out.batches()):
            if count == self._experiment.training.evaluation_batches:
                break
            metrics = self._evaluate({"theta": theta, "batch": batch})["metrics"]
            total += float(metrics["cross_entropy"]) * float(metrics["tokens"])
            tokens += float(metrics["tokens"])
        if not tokens:
            return {}
        self._valid_curves.write(step, {"cross_entropy": total / tokens})
        return {"valid/cross_entropy": total / tokens}

    @contextlib.contextmanager
    def _stopping_on_signals(self) -> Iterator[None]:
        def stop(number, frame):
            if self._stop and number == signal.SIGINT:
                raise KeyboardInterrupt
            self._stop = True
            # Not print: the signal may have come in the middle of one, and Python refuses to write inside a write.
            os.write(2, b"\nstopping after this step, with a checkpoint; the same command will go on from there ...\n")

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class _Window:
    """Speed and padding since the last report."""

    def __init__(self):
        self._start, self._batches, self._tokens = time.monotonic(), 0, 0
        self._padding: dict[str, float] = collections.defaultdict(float)

    def add(self, batch: Batch):
        self._batches += 1
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
