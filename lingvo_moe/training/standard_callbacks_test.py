"""What the standard callbacks report of several processes, and that an evaluation can be interrupted."""

from __future__ import annotations

import types

import numpy as np
import pytest

from lingvo_moe.data.batching import InputConfig
from lingvo_moe.distributed.process_group import ProcessGroup
from lingvo_moe.training import standard_callbacks
from lingvo_moe.training.callbacks import StepResult
from lingvo_moe.training.standard_callbacks import Checkpointer, HeldOutEvaluator


def test_speed_and_padding_count_what_is_no_padding(monkeypatch):
    """Tokens of both sides over the seconds since the last report; padding is the mean over batches, by side."""
    clock = iter([10.0, 12.0])
    monkeypatch.setattr(standard_callbacks.time, "monotonic", lambda: next(clock))
    window = standard_callbacks._Window(InputConfig(batch_size=2, source_length=4, target_length=4))
    segments = np.array([[1, 1, 0, 0], [1, 0, 0, 0]]), np.array([[1, 1, 2, 2], [1, 1, 1, 1]])
    for source, target in (segments, segments[::-1]):
        window.add([{"source": {"segment_ids": source}, "target": {"segment_ids": target}}])
    values = window.values()
    assert values["tokens_per_second"] == pytest.approx((3 + 8 + 8 + 3) / 2.0)
    assert values["padding/source"] == values["padding/target"] == pytest.approx((5 / 8 + 0) / 2)


class _Pending:
    """A metric of a step that still runs: reading it takes until `clock` shows the step's end."""

    def __init__(self, clock: list[float], end: float):
        self._clock, self._end = clock, end

    def __float__(self):
        self._clock[0] = max(self._clock[0], self._end)
        return 1.5


def test_speed_includes_the_time_of_the_step_that_is_reported(monkeypatch, tmp_path):
    """A step is started without waiting for it: a window that closed before its end would show no computation."""
    clock = [0.0]
    monkeypatch.setattr(standard_callbacks.time, "monotonic", lambda: clock[0])
    config = InputConfig(batch_size=1, source_length=2, target_length=2)
    training = types.SimpleNamespace(log_every=1)
    run = types.SimpleNamespace(
        experiment=types.SimpleNamespace(input=config, training=training),
        training=types.SimpleNamespace(rows=range(1)),
        process_group=ProcessGroup(),
        logdir=tmp_path,
        first_step=0,
    )
    batch = {side: {"segment_ids": np.array([[1, 1]])} for side in ("source", "target")}
    data_state = {"positions": {"0": {"next": 1, "pending": [], "rejected": 0}}, "shards": 1}
    reporter = standard_callbacks.Reporter()
    reporter.on_start(run)
    for step in (1, 2):
        reporter.on_step(run, StepResult(step, (batch,), {"loss": _Pending(clock, 8.0 * step)}, data_state, False))
        assert run.scalars["loss"] == 1.5 and run.scalars["tokens_per_second"] == pytest.approx(4 / 8.0)
    reporter.on_close(None)


def test_values_of_processes_become_those_of_the_whole_batch():
    """Shares are means and counts are sums, also where two processes have the same rows (`num_parts` is 2 of 4)."""
    counted = [
        {"tokens_per_second": 100.0, "rejected_pairs": 1.0, "drawn_pairs": 5.0, "padding/source": 0.1},
        {"tokens_per_second": 300.0, "rejected_pairs": 3.0, "drawn_pairs": 7.0, "padding/source": 0.3},
    ]
    expected = {"tokens_per_second": 400.0, "rejected_pairs": 4.0, "drawn_pairs": 12.0}
    expected["padding/source"] = pytest.approx(0.2)
    assert standard_callbacks._of_all(counted, num_parts=2) == expected
    assert standard_callbacks._of_all(counted * 2, num_parts=2) == expected


class _Run:
    """A run whose processes are asked to stop once `batches` have been evaluated."""

    def __init__(self, batches: int, **schedule):
        training = {"evaluate_every": 5, "steps": 12, "evaluation_batches": 4, "checkpoint_every": 5, **schedule}
        self.experiment = types.SimpleNamespace(training=types.SimpleNamespace(**training), translates=True)
        self.training = types.SimpleNamespace(evaluate=self._evaluate, state={})
        self.checkpoints = types.SimpleNamespace(save=lambda *arguments: self.saved.append(arguments))
        self.name, self.scalars, self.evaluated, self.saved = "tiny", {}, [], []
        self.process_group, self.logdir = ProcessGroup(), "log"
        self._batches = batches

    def _evaluate(self, batch: float) -> dict[str, float]:
        self.evaluated.append(batch)
        return {"tokens": 2.0, "cross_entropy": batch}

    def should_stop(self) -> bool:
        return len(self.evaluated) >= self._batches

    def global_data_state(self, state):
        return state


class _HeldOut:
    """Losses in place of batches: 1 to 9, and one nat more with other sources."""

    def batches(self, shuffled: bool, first: int):
        return iter(np.arange(1.0, 1.0 + first) + shuffled)


class _Curves:
    def __init__(self):
        self.written = []

    def write(self, step, values):
        self.written.append((step, dict(values)))


def _evaluate(run: _Run, *steps: int) -> list:
    evaluator = HeldOutEvaluator(_HeldOut())
    evaluator._writer = _Curves()
    for step in steps:
        evaluator.on_step(run, _result(step))
    return evaluator._writer.written


def _result(step: int, last: bool = False) -> StepResult:
    return StepResult(step, (), {}, {"next": step}, last)


def test_held_out_loss_and_source_gain_are_taken_when_due_and_at_the_end():
    """Of `evaluation_batches` batches: the gain is what other sources cost more."""
    run, expected = _Run(batches=1000), {"cross_entropy": 2.5, "source_gain": 1.0}
    assert _evaluate(run, *range(1, 13)) == [(5, expected), (10, expected), (12, expected)]
    assert run.scalars == {"valid/cross_entropy": 2.5, "valid/source_gain": 1.0}
    assert _evaluate(_Run(batches=1000, evaluate_every=0), *range(1, 13)) == []


@pytest.mark.parametrize("batches, written", [(0, None), (2, None), (4, None), (6, {"cross_entropy": 2.5})])
def test_an_interrupted_evaluation_reports_no_loss_of_fewer_batches(batches, written, caplog):
    """A mean of other batches would be a jump in the curve; a grace period is not spent on evaluation.

    Of the last step, no other run would measure it: a warning says what does.
    """
    run = _Run(batches)
    assert _evaluate(run, 5) == ([] if written is None else [(5, written)])
    assert len(run.evaluated) == batches
    assert "eval --logdir=log --split=valid" in caplog.text


def test_checkpoints_are_saved_when_due_and_at_the_last_step():
    """The position in the data is that of the step."""
    run = _Run(batches=0)
    for step in range(1, 8):
        Checkpointer().on_step(run, _result(step, last=step == 7))
    assert [data_state["next"] for _, _, data_state in run.saved] == [5, 7]
