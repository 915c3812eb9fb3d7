"""Callbacks: hooks are called in order, a user's own takes part in a run, and the standard ones follow the schedule.

The engine is `testing.fake_engine`, so nothing is compiled.
"""

from __future__ import annotations

import pathlib
import re
from typing import Any

import numpy as np
import pytest

from lingvo_moe import tree
from lingvo_moe.cli import main
from lingvo_moe.engines.registry import ENGINES
from lingvo_moe.errors import UserError
from lingvo_moe.experiment import Experiment
from lingvo_moe.testing import experiments as tiny
from lingvo_moe.testing.fake_engine import FakeEngine, FakeTraining
from lingvo_moe.training import loop
from lingvo_moe.training.callbacks import CALLBACKS, Callback, register_callback, registered_callbacks
from lingvo_moe.training.checkpoint import Checkpoints


@pytest.fixture(autouse=True)
def registrations_end_with_the_test():
    with CALLBACKS.isolated(), ENGINES.isolated():
        yield


class Recorder(Callback):
    """Writes down which hooks are called, and what they see."""

    def __init__(self, name: str, log: list[str], stop_at: int = 0, fail_at: int = 0):
        self._name, self._log, self._stop_at, self._fail_at = name, log, stop_at, fail_at

    def on_start(self, run):
        self._log.append(f"{self._name} starts after {run.first_step}")

    def on_step(self, run, result):
        self._log.append(f"{self._name} {result.step}{' last' if result.last else ''}")
        run.preemption.requested |= result.step == self._stop_at
        if result.step == self._fail_at:
            raise UserError("no more")

    def on_end(self, run, result):
        self._log.append(f"{self._name} ends at {result.step}")

    def on_close(self, error):
        self._log.append(f"{self._name} closes{f': {error}' if error else ''}")


def _experiment(data: tiny.Data, *changes: str) -> Experiment:
    return tiny.tiny(data, "training.checkpoint_every=4", "training.evaluate_every=3", *changes)


def _train(data: tiny.Data, logdir: pathlib.Path, callbacks: list[Callback], *changes: str) -> dict[str, float]:
    return loop.train(tiny.MODEL, _experiment(data, *changes), FakeEngine(), logdir, callbacks=callbacks)


@pytest.mark.slow
def test_hooks_are_called_in_order_and_closed_in_reverse(data, tmp_path):
    log: list[str] = []
    _train(data, tmp_path, [Recorder("a", log), Recorder("b", log)], "training.steps=2")
    assert log == [
        "a starts after 0",
        "b starts after 0",
        "a 1",
        "b 1",
        "a 2 last",
        "b 2 last",
        "a ends at 2",
        "b ends at 2",
        "b closes",
        "a closes",
    ]


def test_an_error_of_a_callback_ends_training_and_closes_all(data, tmp_path):
    log: list[str] = []
    with pytest.raises(UserError, match="no more"):
        _train(data, tmp_path, [Recorder("a", log), Recorder("b", log, fail_at=1)], "training.steps=9")
    assert log[2:] == ["a 1", "b 1", "b closes: no more", "a closes: no more"]


@pytest.mark.parametrize(
    "callback, message",
    [
        (Callback, r"a callback is the class Callback; expected an object, Callback\(\)"),
        (print, "a callback has no on_start, on_step, on_end, on_close"),
    ],
)
def test_what_is_no_callback_is_refused_before_training(data, tmp_path, callback, message):
    """Not when its first hook is called, after the compilation."""
    with pytest.raises(UserError, match=message):
        _train(data, tmp_path, [callback], "training.steps=2")


@pytest.mark.parametrize(
    "values, message",
    [
        ({"softmax/projektion": np.zeros((16, 256))}, "no weight softmax/projektion. Did you mean softmax/projection"),
        (
            {"softmax/projection": np.zeros((256, 16))},
            r"softmax/projection has shape \(256, 16\); expected \(16, 256\)",
        ),
    ],
)
def test_initial_values_are_of_weights_of_the_model(data, tmp_path, values, message):
    """A message names the weight, before anything is compiled."""
    with pytest.raises(UserError, match=message):
        loop.train(tiny.MODEL, _experiment(data), FakeEngine(), tmp_path, initial_values=values)


def test_what_on_close_returns_does_not_hide_an_error(data, tmp_path):
    """Training would end as if it had been asked to stop, and say that a step is saved that is not."""

    class Closer(Recorder):
        def on_close(self, error):
            super().on_close(error)
            return True

    with pytest.raises(UserError, match="no more"):
        _train(data, tmp_path, [Closer("a", [], fail_at=1)], "training.steps=9")


@pytest.mark.slow
def test_a_request_to_stop_ends_training_after_the_next_step_with_a_checkpoint(data, tmp_path, caplog, capsys):
    """Callbacks see that it is the last step; the next run resumes there."""
    log: list[str] = []
    caplog.set_level("INFO", "lingvo_moe")
    with pytest.raises(KeyboardInterrupt):
        _train(data, tmp_path, [Recorder("a", log, stop_at=5)], "training.steps=9")
    assert log[-3:] == ["a 6 last", "a ends at 6", "a closes"] and Checkpoints(tmp_path).latest() == 6
    assert "stopped after step 6, which is saved" in caplog.text
    assert re.search(r"training \S+: 6/9 steps, .*  stopped\n", capsys.readouterr().err)
    _train(data, tmp_path, [Recorder("b", log)], "training.steps=9")
    assert log[9:11] == ["b starts after 6", "b 7"]
    assert "resuming from step 6" in caplog.text


def test_a_run_is_not_resumed_with_another_seed(data, tmp_path):
    """It would go on with the seed of the checkpoint, and record the other one."""
    _train(data, tmp_path, [], "training.steps=2", "training.seed=3")
    with pytest.raises(UserError, match=r"training.seed is 4, but \S+/2 was trained with seed 3.*training.seed=3"):
        _train(data, tmp_path, [], "training.steps=4", "training.seed=4")
    _train(data, tmp_path, [], "training.steps=3", "training.seed=3")
    assert Checkpoints(tmp_path).latest() == 3


def test_initial_weights_must_be_finite(data, tmp_path, monkeypatch):
    """Of a log directory as of a file: every step would be skipped."""
    initialise = FakeTraining.initialise

    def spoil(self, seed):
        initialise(self, seed)
        tree.flatten(self.state["theta"])["softmax/projection"][-1] = np.nan

    monkeypatch.setattr(FakeTraining, "initialise", spoil)
    _train(data, tmp_path / "given", [], "training.steps=2")
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"given/checkpoints/2: softmax/projection has values that are not finite"):
        loop.train(tiny.MODEL, _experiment(data), FakeEngine(), tmp_path / "new", initial_weights=tmp_path / "given")


@pytest.mark.slow
def test_standard_callbacks_follow_the_schedule(data, tmp_path):
    """Reports every `log_every` steps, checkpoints and held-out losses when they are due, and all at the end."""
    metrics = _train(data, tmp_path, [], "training.steps=10", "training.log_every=2", "training.keep=9")
    assert sorted(tiny.curves(tmp_path)["cross_entropy"]) == [2, 4, 6, 8, 10]
    assert sorted(tiny.curves(tmp_path, "valid")["cross_entropy"]) == [3, 6, 9, 10]
    assert Checkpoints(tmp_path).steps() == [4, 8, 10]
    assert metrics["cross_entropy"] == pytest.approx(0.1) and metrics["valid/cross_entropy"] == pytest.approx(0.3)
    assert metrics["tokens_per_second"] > 0 and 0 < metrics["padding/source"] < 1


def test_too_many_skipped_steps_end_training(data, tmp_path, monkeypatch):
    """The guard needs no compiled program; what cannot be recomputed is named in the error."""
    train = FakeTraining.train

    def train_and_skip(self, batches):
        return {**train(self, batches), "skipped_in_a_row": int(self.state["step"])}

    monkeypatch.setattr(FakeTraining, "train", train_and_skip)
    with pytest.raises(
        UserError, match=r"the loss of step 3 is .*3 consecutive updates were skipped.*It could not be recomputed"
    ):
        _train(data, tmp_path, [], "training.steps=9", "training.max_skipped=3")
    assert (tmp_path / "replay" / "3.npz").exists()


_EXTENSION = """
from lingvo_moe.engines.registry import register_engine
from lingvo_moe.testing.fake_engine import FakeEngine
from lingvo_moe.training.callbacks import Callback, register_callback


@register_engine("fake")
def make(options):
    return FakeEngine(options.num_devices)


@register_callback("steps")
class Steps(Callback):
    def on_step(self, run, result):
        print("step", result.step)
"""


def test_a_users_engine_and_callback_take_part_through_import(data, tmp_path, capsys):
    """One file of `--import` is enough for both; commands that the engine cannot run say so."""
    (tmp_path / "mine.py").write_text(_EXTENSION, encoding="utf-8")
    flags = [f"--import={tmp_path}/mine.py", "--engine=fake", f"--tokenizers={data.tokenizers}", "--cache=off"]
    flags += [*tiny.settings(), f"--corpus={data.corpus}", f"--logdir={tmp_path / 'log'}"]
    assert main.main(["lingvo_moe", "train", *flags, "--steps=3"]) == 0
    assert capsys.readouterr().out == "step 1\nstep 2\nstep 3\n"
    assert Checkpoints(tmp_path / "log").steps() == [3]
    assert main.main(["lingvo_moe", "eval", *flags]) == 2
    assert "error: the fake engine cannot decode." in capsys.readouterr().err


class Mistaken(Callback):
    def on_step(self, run):  # type: ignore[override]
        pass


class Misspelled(Callback):
    def on_steps(self, run, result):
        pass


class NoCallback:
    pass


def _made() -> Any:
    return NoCallback()


@pytest.mark.parametrize(
    "factory, message",
    [
        (Mistaken, r"'own': on_step takes \(self, run\); it is called with \(self, run, result\), as Callback in"),
        (
            Misspelled,
            "'own': there is no hook on_steps. Did you mean on_step, .* Hooks: on_start, on_step, on_end, on_close",
        ),
        (NoCallback, "'own' has no on_start, on_step, on_end, on_close, which Callback in"),
        (Recorder, r"'own' takes \(name: .*\); it is called with \(\)"),
    ],
)
def test_a_malformed_callback_is_not_registered(factory, message):
    """Its hooks would fail in training, or never be called."""
    with pytest.raises(UserError, match=f"^callback {message}"):
        register_callback("own")(factory)
    register_callback("made")(_made)
    with pytest.raises(UserError, match="^callback 'made' has no on_start, "):
        registered_callbacks()


def test_a_function_that_returns_a_class_made_no_callback():
    """Its hooks would be called without `self`."""
    register_callback("class")(lambda: Callback)
    with pytest.raises(UserError, match=r"^callback 'class' is the class Callback; expected an object, Callback\(\)"):
        registered_callbacks()


def test_callbacks_are_registered_by_name():
    register_callback("steps")(type("Steps", (Callback,), {}))
    with pytest.raises(UserError, match="callback 'steps' is already registered"):
        register_callback("steps")(Callback)
