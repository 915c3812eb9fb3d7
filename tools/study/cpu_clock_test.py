"""Protects the measure of a run's CPU time: it continues after a kill without what was lost, and ends a training run.

The engine is `testing.fake_engine`, so nothing is compiled.
"""

from __future__ import annotations

import itertools
import os
import time

import numpy as np
import pytest

from lingvo_moe.data.pipeline import TrainInput
from lingvo_moe.errors import UserError
from lingvo_moe.testing import experiments as tiny
from lingvo_moe.testing.fake_engine import FakeEngine
from lingvo_moe.training import loop
from lingvo_moe.training.callbacks import CALLBACKS
from lingvo_moe.training.checkpoint import Checkpoints
from tools.study import ticks
from tools.study.ticks import Tick

pytestmark = pytest.mark.slow

with CALLBACKS.isolated():  # importing it registers it, for all tests of this process
    from tools.study.cpu_clock import CpuClock


def _train(data, logdir, steps: int):
    config = tiny.tiny(data, f"training.steps={steps}", "training.checkpoint_every=4", "training.evaluate_every=3")
    loop.train(tiny.MODEL, config, FakeEngine(), logdir, callbacks=[CpuClock()])


def test_ticks_have_time_tokens_and_losses(data, tmp_path):
    """Tokens are those of the batches that training reads, counted here from the input itself."""
    before = time.process_time()
    _train(data, tmp_path, 5)
    used = time.process_time() - before
    found = ticks.read(tmp_path)
    assert [tick.step for tick in found] == [1, 2, 3, 4, 5]
    assert all(a.seconds <= b.seconds for a, b in itertools.pairwise(found)) and 0 < found[-1].seconds < used
    batches = TrainInput(data.corpus, data.tokenizers, tiny.tiny(data).input).batches()
    counts = [int((batch["target"]["segment_ids"] > 0).sum()) for batch, _ in itertools.islice(batches, 5)]
    batches.close()
    assert [tick.tokens for tick in found] == np.cumsum(counts).tolist()
    assert found[2].scalars["valid/cross_entropy"] == pytest.approx(1.0)  # 3 / step
    assert found[3].scalars == {"cross_entropy": 0.25}


def test_a_resumed_training_counts_no_step_twice(data, tmp_path):
    """A kill after step 5 loses what came after the checkpoint of step 4; a line may be cut off."""
    _train(data, tmp_path, 4)
    made = ticks.read(tmp_path)
    with open(ticks.path(tmp_path), "a", encoding="utf-8") as file:
        file.write(Tick(5, made[-1].seconds + 1000, 999_999).line() + '{"step": 6, "seco')
    _train(data, tmp_path, 6)
    found = ticks.read(tmp_path)
    assert [tick.step for tick in found] == [1, 2, 3, 4, 5, 6] and found[:4] == made
    assert found[-1].seconds < made[-1].seconds + 100 and found[-1].tokens < 999_999


def test_a_lost_tick_counts_as_those_before(data, tmp_path):
    """The checkpoint of step 4 may be complete before its tick is written; its time would not be counted."""
    _train(data, tmp_path, 4)
    before = ticks.read(tmp_path)[:3]
    ticks.rewrite(tmp_path, before)
    _train(data, tmp_path, 6)
    found = ticks.read(tmp_path)
    assert [tick.step for tick in found] == [1, 2, 3, 4, 5, 6] and found[:3] == before
    assert found[3].seconds == pytest.approx(before[-1].seconds * 4 / 3, abs=1e-4)
    assert found[3].tokens == round(before[-1].tokens * 4 / 3) and found[4].tokens > found[3].tokens


def test_ticks_that_are_gone_are_an_error(data, tmp_path):
    """Counted from zero, the run would get twice the time of the others."""
    _train(data, tmp_path, 4)
    ticks.path(tmp_path).unlink()
    with pytest.raises(UserError, match="the CPU time of step 4, from which training resumes, is missing"):
        _train(data, tmp_path, 6)


@pytest.mark.parametrize(
    ("variable", "value", "stops"),
    [
        (ticks.LIMIT, "0", True),
        (ticks.LIMIT, "100000", False),
        (ticks.PARENT, str(os.getppid() + 1), True),  # that was killed, and this process has another one now
        (ticks.PARENT, str(os.getppid()), False),
    ],
)
def test_training_ends_with_a_checkpoint(data, tmp_path, monkeypatch, variable, value, stops):
    """After its time, and when nobody waits for it any more."""
    monkeypatch.setenv(variable, value)
    if stops:
        with pytest.raises(KeyboardInterrupt):
            _train(data, tmp_path, 9)
    else:
        _train(data, tmp_path, 9)
    last = 2 if stops else 9
    assert Checkpoints(tmp_path).latest() == last and ticks.read(tmp_path)[-1].step == last
