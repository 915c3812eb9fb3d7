"""Measures the CPU time of a training run, and ends it after a given time: a callback.

    STUDY_CPU_SECONDS=1800 python -m lingvo_moe train --import=tools.study.cpu_clock ...

The log directory gets a file with the CPU time and the target tokens after each step (`ticks`). The time is that of all
threads of the process, from the first step on, without compilation. A resumed training continues from the time of its
checkpoint, so what a kill has lost is not counted.
"""

from __future__ import annotations

import os
import time

import numpy as np

from lingvo_moe.errors import UserError
from lingvo_moe.training.callbacks import Callback, StepResult, TrainingRun, register_callback
from tools.study import ticks
from tools.study.ticks import Tick

_SCALARS = ("cross_entropy", "overflow", "expert_load", "valid/cross_entropy", "valid/source_gain")


@register_callback("cpu_clock")
class CpuClock(Callback):
    """Writes a tick after each step."""

    def on_start(self, run: TrainingRun):
        """Drops the ticks of steps that a kill has lost. Raises UserError if those before are missing."""
        kept = [tick for tick in ticks.read(run.logdir) if tick.step <= run.first_step]
        self._last = kept[-1] if kept else Tick(0, 0.0, 0)
        lost = run.first_step - self._last.step
        if lost > run.experiment.training.steps_per_loop:
            raise UserError(
                f"{ticks.path(run.logdir)}: the CPU time of step {run.first_step}, from which training resumes, is "
                f"missing; delete {run.logdir} to train from the start."
            )
        if lost and kept:
            # A kill right after a checkpoint may lose the tick of its step, which counts as those before, on average.
            share = run.first_step / self._last.step
            self._last = Tick(run.first_step, self._last.seconds * share, round(self._last.tokens * share))
            kept.append(self._last)
        ticks.rewrite(run.logdir, kept)
        self._file = open(ticks.path(run.logdir), "a", encoding="utf-8")  # noqa: SIM115  (stays open until `on_close`)
        self._limit, self._parent = float(os.environ.get(ticks.LIMIT, "inf")), os.environ.get(ticks.PARENT)
        self._before = time.process_time()

    def on_step(self, run: TrainingRun, result: StepResult):
        """Writes the tick; asks training to stop if its time is over or if nobody waits for it."""
        now = time.process_time()
        tokens = sum(int(np.count_nonzero(batch["target"]["segment_ids"])) for batch in result.batches)
        self._last = Tick(
            result.step, self._last.seconds + now - self._before, self._last.tokens + tokens, _reported(run, result)
        )
        self._before = now
        self._file.write(self._last.line())
        self._file.flush()
        is_orphan = self._parent not in (None, str(os.getppid()))
        if not result.last and (self._last.seconds >= self._limit or is_orphan):
            run.preemption.request()

    def on_close(self, error: BaseException | None):
        """Closes the file."""
        self._file.close()


def _reported(run: TrainingRun, result: StepResult) -> dict[str, float]:
    """Returns the scalars of a step after which there was a report or an evaluation."""
    schedule = run.experiment.training
    intervals = filter(None, (schedule.log_every, schedule.evaluate_every))
    if not result.last and all(result.step % interval for interval in intervals):
        return {}
    return {name: round(run.scalars[name], 5) for name in _SCALARS if name in run.scalars}
