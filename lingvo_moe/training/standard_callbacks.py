"""The callbacks of every training run: reported values, checkpoints, held-out evaluation and progress."""

from __future__ import annotations

import collections
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from lingvo_moe.data.batching import Batch, BatchConfig, padding_fractions
from lingvo_moe.data.pipeline import EvalInput, drawn_pairs, rejected_pairs
from lingvo_moe.training.callbacks import Callback, StepResult, TrainingRun
from lingvo_moe.training.loss import total_loss
from lingvo_moe.training.summary import NoWriter, SummaryWriter
from lingvo_moe.utils import progress

_logger = logging.getLogger(__name__)
_SUMS = ("tokens_per_second", "drawn_pairs", "rejected_pairs")  # of the rows of all processes; other values are means


class Reporter(Callback):
    """Writes metrics, speed and padding to TensorBoard every `training.log_every` steps, and sets `run.scalars`."""

    def on_start(self, run: TrainingRun):
        """Opens the curves; only the primary process writes them."""
        self._writer = _open_writer(run, "train")
        self._window = _Window(run.experiment.input)

    def on_step(self, run: TrainingRun, result: StepResult):
        """Counts the batches; reports when it is time."""
        self._window.add(result.batches)
        if result.step % run.experiment.training.log_every and not result.last:
            return
        # Waits for the steps, which may still be running, so that the window holds all of their time.
        scalars = {name: float(value) for name, value in result.metrics.items()}
        state = result.data_state
        pairs = {"drawn_pairs": drawn_pairs(state), "rejected_pairs": rejected_pairs(state)}
        counted = run.process_group.gather(self._window.values() | pairs)
        num_parts = run.experiment.input.batch_size / len(run.training.rows)
        run.scalars = scalars | _of_all(counted, num_parts)
        self._writer.write(result.step, run.scalars)
        self._window = _Window(run.experiment.input)

    def on_close(self, error: BaseException | None):
        """Closes the curves."""
        self._writer.close()


class Checkpointer(Callback):
    """Saves a checkpoint every `training.checkpoint_every` steps, and at the end."""

    def on_step(self, run: TrainingRun, result: StepResult):
        """Begins to save when it is time; the next steps run meanwhile."""
        if result.step % run.experiment.training.checkpoint_every == 0 or result.last:
            run.checkpoints.save(run.name, run.training.state, run.global_data_state(result.data_state))


class HeldOutEvaluator(Callback):
    """Computes the loss of the validation split every `training.evaluate_every` steps, and when training is done.

    Of a translation model also `source_gain`: how many nats more the same targets cost with the sources of other
    sentences. While it is near 0, the model does not read the source.
    """

    def __init__(self, held_out: EvalInput):
        """Takes the validation split."""
        self._held_out = held_out

    def on_start(self, run: TrainingRun):
        """Opens the curves; only the primary process writes them."""
        self._writer = _open_writer(run, "valid")

    def on_step(self, run: TrainingRun, result: StepResult):
        """Evaluates when it is time; adds `valid/cross_entropy` and `valid/source_gain` to `run.scalars`."""
        schedule = run.experiment.training
        if not schedule.evaluate_every or (result.step % schedule.evaluate_every and result.step != schedule.steps):
            return
        losses = self._losses(run)
        if losses:
            self._writer.write(result.step, losses)
            run.scalars |= {f"valid/{name}": value for name, value in losses.items()}

    def on_close(self, error: BaseException | None):
        """Closes the curves."""
        self._writer.close()

    def _losses(self, run: TrainingRun) -> dict[str, float]:
        """Returns what the curves show; nothing without batches, or if asked to stop."""
        cross_entropy, losses = self._cross_entropy(run), {}
        if cross_entropy is not None:
            losses["cross_entropy"] = cross_entropy
            if run.experiment.translates:
                shuffled = self._cross_entropy(run, shuffled=True)
                if shuffled is not None:
                    losses["source_gain"] = shuffled - cross_entropy
        is_complete = len(losses) == 1 + run.experiment.translates
        # The same in all processes, which ask together.
        if not is_complete and run.should_stop() and run.process_group.is_primary:
            _logger.warning(
                "asked to stop, so the held-out evaluation is not complete; `python -m lingvo_moe eval --logdir=%s "
                "--split=valid` evaluates the newest checkpoint.",
                run.logdir,
            )
        return losses

    def _cross_entropy(self, run: TrainingRun, shuffled: bool = False) -> float | None:
        """Returns nats per target token of the first batches; None without batches, or if asked to stop."""
        batches = self._held_out.batches(shuffled, run.experiment.training.evaluation_batches)
        until_stopped = itertools.takewhile(lambda batch: not run.should_stop(), batches)
        tokens, nats = total_loss(run.training.evaluate, until_stopped)
        return nats / tokens if tokens and not run.should_stop() else None


class ProgressBar(Callback):
    """Shows progress, with the most recent loss, on the standard error of the primary process."""

    _NOTES: Mapping[str, str] = {
        "loss": "cross_entropy",
        "valid": "valid/cross_entropy",
        "source gain": "valid/source_gain",
        "overflow": "overflow",
        "lr": "learning_rate",
        "tok/s": "tokens_per_second",
    }

    def on_start(self, run: TrainingRun):
        """Shows how many steps earlier runs have made."""
        self._step, self._steps = run.first_step, run.experiment.training.steps
        self._bar = progress.bar(
            f"training {run.name}",
            self._steps,
            "steps",
            done=run.first_step,
            shown=run.process_group.is_primary,
        )
        self._advance: Callable[..., None] = self._bar.__enter__()

    def on_step(self, run: TrainingRun, result: StepResult):
        """Advances the bar."""
        note = " ".join(
            f"{label} {run.scalars[name]:.4g}" for label, name in self._NOTES.items() if name in run.scalars
        )
        self._advance(result.step - self._step, note=note)
        self._step = result.step

    def on_close(self, error: BaseException | None):
        """Ends the bar."""
        # Training that is asked to stop ends without an error; an exception makes the bar say `stopped`.
        ended = error or (None if self._step >= self._steps else KeyboardInterrupt())
        self._bar.__exit__(None if ended is None else type(ended), ended, None)


def _open_writer(run: TrainingRun, curves: str) -> SummaryWriter:
    return SummaryWriter(run.logdir, curves) if run.process_group.is_primary else NoWriter()


class _Window:
    """Speed and padding since the last report."""

    def __init__(self, config: BatchConfig):
        self._lengths = config.lengths
        self._start, self._batches, self._tokens = time.monotonic(), 0, 0
        self._padding: dict[str, float] = collections.defaultdict(float)

    def add(self, batches: Sequence[Batch]):
        """Counts these batches."""
        self._batches += len(batches)
        for batch in batches:
            for side, share in padding_fractions(batch).items():
                self._padding[side] += share
                self._tokens += round((1.0 - share) * len(batch[side]["segment_ids"]) * self._lengths[side])

    def values(self) -> dict[str, float]:
        """Returns `tokens_per_second` of both sides without padding, and the share of padding of each side."""
        return {
            "tokens_per_second": self._tokens / max(time.monotonic() - self._start, 1e-9),
            **{f"padding/{side}": total / self._batches for side, total in self._padding.items()},
        }


def _of_all(counted: list[dict[str, float]], num_parts: float) -> dict[str, float]:
    """Returns the values of whole batches.

    Args:
      counted: the values of some processes, each of its own rows.
      num_parts: how many times the rows of one process a batch has.
    """
    means = {name: sum(values[name] for values in counted) / len(counted) for name in counted[0]}
    return means | {name: means[name] * num_parts for name in _SUMS}
