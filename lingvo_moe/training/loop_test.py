"""Training resumes bit for bit after a crash, stops when asked, keeps its checkpoints, and reports mistakes."""

from __future__ import annotations

import logging
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from lingvo_moe import overrides, tree
from lingvo_moe.engines.pjrt import Engine, Training
from lingvo_moe.errors import UserError
from lingvo_moe.experiment import Experiment
from lingvo_moe.testing import experiments as tiny
from lingvo_moe.testing import harness
from lingvo_moe.testing.fake_engine import FakeEngine
from lingvo_moe.training import logdir_lock, loop
from lingvo_moe.training.callbacks import Callback
from lingvo_moe.training.checkpoint import Checkpoints
from lingvo_moe.training.checkpoint_reader import Reader

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_once")]

_REPOSITORY = pathlib.Path(loop.__file__).parents[2]
# `python -m lingvo_moe`, with as many devices to choose from as here: so it finds what was compiled here.
_MAIN = (
    "import jax, runpy; jax.config.update('jax_num_cpu_devices', 8); jax.devices(); "
    "runpy.run_module('lingvo_moe', run_name='__main__', alter_sys=True)"
)
_OPTIONS_OF_TESTS = ("JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS")
# Trains on four devices and on one: arguments are the corpus, the tokenizers, the log directory and changes.
_ON_FOUR_AND_ONE = """
import sys
from lingvo_moe.engines.pjrt import Engine
from lingvo_moe.sharding.layout import DeviceMesh
from lingvo_moe.testing import experiments as tiny
from lingvo_moe.training import logdir_lock, loop

corpus, tokenizers, logdir, *changes = sys.argv[1:]
for devices in (4, 1):
    config = tiny.tiny(tiny.Data(corpus, tokenizers), *changes, mesh=DeviceMesh((devices,)))
    loop.train(tiny.MODEL, config, Engine(devices, "cpu"), f"{logdir}/{devices}")
"""


def _losses(logdir: pathlib.Path, run: str = "train") -> dict[int, float]:
    """Returns every loss by step; a step that was reported twice must have been reported with the same loss."""
    found = tiny.curves(logdir, run)["cross_entropy"]
    assert all(len(values) == 1 for values in found.values())
    return {step: min(values) for step, values in found.items()}


def _command(data: tiny.Data, logdir: pathlib.Path, steps: int) -> list[str]:
    changes = ("training.checkpoint_every=4", "training.evaluate_every=0")
    return [
        sys.executable,
        "-c",
        _MAIN,
        "train",
        *tiny.language_model_settings(*changes),
        f"--corpus={data.corpus}",
        f"--tokenizers={data.tokenizers}",
        f"--logdir={logdir}",
        "--platform=cpu",
        f"--steps={steps}",
    ]


def _schedule(steps: int) -> tuple[str, ...]:
    return f"training.steps={steps}", "training.checkpoint_every=4", "training.evaluate_every=6"


def _start(command: list[str]) -> subprocess.Popen:
    return subprocess.Popen(
        command,
        cwd=_REPOSITORY,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def _wait_for(path: pathlib.Path, process: subprocess.Popen):
    while not path.exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)


def test_a_killed_run_resumes_bit_for_bit(data, tmp_path):
    """SIGKILL at an arbitrary step, SIGTERM in the next run, then a third to the end, here: the losses of one run."""
    steps, uninterrupted, interrupted = 60, tmp_path / "uninterrupted", tmp_path / "interrupted"
    schedule = (f"training.steps={steps}", f"training.checkpoint_every={steps}", "training.evaluate_every=0")
    loop.train(tiny.LANGUAGE_MODEL, tiny.tiny_language_model(data, *schedule), Engine(2, "cpu"), uninterrupted)
    expected = _losses(uninterrupted)
    assert sorted(expected) == list(range(1, steps + 1))

    process = _start(_command(data, interrupted, steps))
    _wait_for(interrupted / "checkpoints" / "8", process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    reached = Checkpoints(interrupted).latest()
    assert 8 <= reached < steps

    process = _start(_command(data, interrupted, steps))
    _wait_for(interrupted / "checkpoints" / str(reached + 8), process)
    process.send_signal(signal.SIGTERM)
    stderr = process.communicate()[1]
    assert process.returncode == 130 and "with a checkpoint" in stderr and f"resuming from step {reached}" in stderr
    stopped = Checkpoints(interrupted).latest()
    assert reached + 8 <= stopped < steps and stopped == max(_losses(interrupted)), (
        "the step in progress is saved, none is lost"
    )

    loop.train(tiny.LANGUAGE_MODEL, tiny.tiny_language_model(data, *schedule), Engine(2, "cpu"), interrupted)
    assert _losses(interrupted) == expected


def test_four_devices_train_as_one_with_the_compiler_of_users(data, tmp_path):
    """Other tests compile with few optimizations and XLA's older code generator for CPUs, see `conftest.py`.

    Devices add in another order than one does, see `testing.translation.TOLERANCE`.
    """
    changes = ("model.num_layers=2", "model.encoder_layer_pattern=dense", "model.layer_pattern=moe")
    changes += ("training.steps=4", "training.evaluate_every=0")
    command = [sys.executable, "-c", _ON_FOUR_AND_ONE, data.corpus, data.tokenizers, tmp_path, *changes]
    environment = {name: value for name, value in os.environ.items() if name not in _OPTIONS_OF_TESTS}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(command, cwd=_REPOSITORY, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    found, expected = _losses(tmp_path / "4"), _losses(tmp_path / "1")
    assert sorted(found) == sorted(expected) == [1, 2, 3, 4]
    np.testing.assert_allclose(
        [found[step] for step in expected], list(expected.values()), rtol=64 * harness.FLOAT32_ROUNDING
    )


@pytest.mark.parametrize(("after", "steps", "logged"), [(3, 2, True), (2, 2, True), (1, 2, False), (2, 0, False)])
def test_a_run_that_ends_before_the_cooldown_says_so(data, tmp_path, caplog, after, steps, logged):
    """A run with fewer --steps than the model's own schedule would train at the full rate to its end."""
    caplog.set_level(logging.INFO, "lingvo_moe")
    schedule = (f"cooldown_after={after}", f"cooldown_steps={steps}")
    changes = (f"optimizer.learning_rate.{change}" for change in schedule)
    loop.train(tiny.MODEL, tiny.tiny(data, "training.steps=2", *changes), FakeEngine(), tmp_path)
    message = f"training ends at step 2, before the learning rate's cool-down, which begins after step {after}; for one"
    remedy = "--set=optimizer.learning_rate.cooldown_after=1 --set=optimizer.learning_rate.cooldown_steps=1"
    found = [line for line in caplog.messages if line.startswith(message) and line.endswith(remedy)]
    assert len(found) == logged and logged == ("cool-down" in caplog.text)


def test_a_finished_run_changes_nothing(data, tmp_path, caplog):
    """Running the same command again is harmless; `keep` checkpoints stay; the held-out loss is computed when due."""
    caplog.set_level(logging.INFO, "lingvo_moe")
    experiment = tiny.tiny_language_model(data, *_schedule(12))
    metrics = loop.train("tiny", experiment, Engine(2, "cpu"), tmp_path)
    assert np.isfinite(metrics["valid/cross_entropy"]) and metrics["rejected_pairs"] == 0
    assert {"aux_loss", "overflow", "expert_load", "tokens_per_second"} <= set(metrics)
    assert 0 < metrics["padding/target"] < 1
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["12", "8"]
    assert sorted(_losses(tmp_path, "valid")) == [6, 12]
    before = _losses(tmp_path)
    assert loop.train("tiny", experiment, Engine(2, "cpu"), tmp_path) == {}
    assert "already been trained for 12 steps" in caplog.messages[-1] and _losses(tmp_path) == before


def test_diverged_training_ends_and_keeps_its_checkpoint(data, tmp_path, monkeypatch):
    """Once the weights are too large every step is skipped, until `max_skipped` of them have been."""
    make = Training.train

    def make_and_blow_up(self, batches):
        metrics = make(self, batches)
        if int(np.asarray(self.state["step"])) == 6:
            blown_up = tree.map_leaves(lambda weight: np.array(weight) * np.float32(1e30), self.state["theta"])
            self.load(self.state | {"theta": blown_up})
        return metrics

    monkeypatch.setattr(Training, "train", make_and_blow_up)
    wild = tiny.tiny_language_model(data, *_schedule(40), "training.max_skipped=5")
    with pytest.raises(
        UserError, match=r"the loss of step 11 is (nan|inf).*5 consecutive updates were skipped as non-finite"
    ):
        loop.train("tiny", wild, Engine(2, "cpu"), tmp_path)
    skipped = [max(values) for _, values in sorted(tiny.curves(tmp_path)["skipped_in_a_row"].items())]
    assert skipped[-6:] == [0, 1, 2, 3, 4, 5] or skipped[-6:] == [1, 2, 3, 4, 5, 6], skipped
    assert Checkpoints(tmp_path).latest()


def test_several_steps_in_one_call_have_the_same_losses(data, tmp_path):
    """The next run completes a loop of three that the end of training cut short."""
    schedule = ("training.checkpoint_every=6", "training.evaluate_every=0", "training.log_every=3")
    for logdir, changes, ends in (("one", (), (10,)), ("three", ("training.steps_per_loop=3",), (4, 10))):
        for end in ends:
            config = tiny.tiny_language_model(data, *schedule, *changes, f"training.steps={end}")
            loop.train("tiny", config, Engine(2, "cpu"), tmp_path / logdir)
    one, three = _losses(tmp_path / "one"), _losses(tmp_path / "three")
    assert sorted(one) == [3, 6, 9, 10] and sorted(three) == [3, 4, 6, 9, 10]
    assert {step: three[step] for step in one} == one


def test_a_checkpoint_of_another_model_or_optimizer_is_refused(data, tmp_path):
    """A wrong --model or --set does not harm the existing checkpoint, and is reported before compilation."""
    experiment = tiny.tiny_language_model(data, *_schedule(4))
    loop.train("tiny", experiment, Engine(2, "cpu"), tmp_path)
    other = overrides.apply(experiment, ["model.num_experts=8", "training.steps=8"])
    with pytest.raises(
        UserError, match=r"holds tiny, whose weights are not those of other: .*gate is .*4\] there, .*8\] here"
    ):
        loop.train("other", other, Engine(2, "cpu"), tmp_path)
    for change, difference in (
        ("training.ema_decay=0.9", r"ema_gap/\S* is absent there, \[.*\] here"),
        ("optimizer.beta1=0.9", r"optimizer_state/\S*/momentum is absent there"),
    ):
        with pytest.raises(UserError, match=rf"was saved with other settings .*{difference}.*--initial_weights="):
            loop.train("tiny", tiny.tiny_language_model(data, *_schedule(8), change), Engine(2, "cpu"), tmp_path)
    assert Checkpoints(tmp_path).latest() == 4


class _Start(Callback):
    """Saves the state before the first step."""

    def on_start(self, run):
        self.state = {path: np.asarray(leaf) for path, leaf in tree.flatten(run.training.state).items()}


def test_new_training_starts_with_the_weights_of_another_one(data, tmp_path):
    """All of them, bit for bit, and nothing else: step 0, an initial optimizer state, the corpus from its beginning.

    The same command resumes from its own checkpoint, and weights of another model are refused before compilation.
    """
    experiment, start, given = tiny.tiny_language_model(data, *_schedule(4)), _Start(), tmp_path / "given"
    loop.train("tiny", experiment, Engine(2, "cpu"), given)
    loop.train("tiny", experiment, Engine(2, "cpu"), tmp_path / "random", callbacks=[random := _Start()])
    loop.train("tiny", experiment, Engine(2, "cpu"), tmp_path / "tuned", callbacks=[start], initial_weights=given)
    reader = Reader(Checkpoints(given).path(4))
    for path, value in start.state.items():
        expected = reader.read(path) if path.startswith("theta/") else random.state[path]
        np.testing.assert_array_equal(value, expected, err_msg=path)
    assert any(not np.array_equal(value, random.state[path]) for path, value in start.state.items())
    assert _losses(tmp_path / "tuned")[4] < _losses(tmp_path / "random")[4]

    longer = tiny.tiny_language_model(data, *_schedule(5))
    loop.train("tiny", longer, Engine(2, "cpu"), tmp_path / "tuned", callbacks=[start], initial_weights=given)
    assert int(start.state["step"]) == 4
    other = overrides.apply(experiment, ["model.num_experts=8"])
    with pytest.raises(UserError, match=r"holds tiny, whose weights are not those of other: .*gate is"):
        loop.train("other", other, Engine(2, "cpu"), tmp_path / "other", initial_weights=given)


def _save_zeros(logdir: pathlib.Path, step: int, experiment: Experiment):
    """Saves weights without a state, which were trained with other tokenizers."""
    theta = tree.map_leaves(lambda spec: np.zeros(spec.shape, spec.dtype), experiment.steps.state_specs()["theta"])
    checkpoints = Checkpoints(logdir, keep=1)
    checkpoints.save_weights(step, "tiny", theta, "a test", ["x", "y"])
    checkpoints.close()


def test_weights_of_step_0_are_a_checkpoint(data, tmp_path):
    """Training does not start with random weights beside them, whose first checkpoints would remove them."""
    experiment = tiny.tiny_language_model(data, *_schedule(1))
    _save_zeros(tmp_path, 0, experiment)
    with pytest.raises(UserError, match=r"checkpoints/0 holds weights only \(a test\).*--initial_weights="):
        loop.train("tiny", experiment, tiny.Uncompiled(2, "cpu"), tmp_path)


def test_initial_weights_of_other_tokenizers_are_refused(data, tmp_path):
    """Before anything is compiled: each row of the embeddings would stand for another piece."""
    experiment = tiny.tiny_language_model(data, *_schedule(1))
    _save_zeros(tmp_path / "given", 4, experiment)
    with pytest.raises(
        UserError, match="--initial_weights=.*given: trained with other tokenizers than --tokenizers=.*"
    ):
        loop.train("tiny", experiment, tiny.Uncompiled(2, "cpu"), tmp_path, initial_weights=tmp_path / "given")


def test_new_training_starts_with_given_values(data, tmp_path):
    """Of one weight, bit for bit on both devices; the others are random, and a resumed training keeps its own."""
    experiment, path = tiny.tiny_language_model(data, *_schedule(2)), "embedding/table"
    loop.train("tiny", experiment, Engine(2, "cpu"), tmp_path / "random", callbacks=[random := _Start()])
    values = {path: np.random.default_rng(0).normal(size=random.state[f"theta/{path}"].shape).astype(np.float32)}
    start, logdir = _Start(), tmp_path / "given"
    loop.train("tiny", experiment, Engine(2, "cpu"), logdir, callbacks=[start], initial_values=values)
    changed = {name for name, value in start.state.items() if not np.array_equal(value, random.state[name])}
    assert changed == {f"theta/{path}"}
    np.testing.assert_array_equal(start.state[f"theta/{path}"], values[path])

    longer = tiny.tiny_language_model(data, *_schedule(3))
    loop.train("tiny", longer, Engine(2, "cpu"), logdir, callbacks=[start], initial_values=values)
    assert int(start.state["step"]) == 2 and not np.array_equal(start.state[f"theta/{path}"], values[path])


def test_checkpoints_are_closed_whatever_training_does(data, tmp_path, monkeypatch):
    """Those of the log directory and of the initial weights, which a resumed or a finished run does not read."""
    closed, close = set(), Checkpoints.close
    monkeypatch.setattr(
        Checkpoints, "close", lambda checkpoints: [closed.add(checkpoints.directory.parent.name), close(checkpoints)]
    )
    loop.train(tiny.MODEL, tiny.tiny(data, "training.steps=1"), FakeEngine(), tmp_path / "given")
    for steps in (1, 2, 2):  # a new run, a resumed one, and one that is finished
        closed.clear()
        config = tiny.tiny(data, f"training.steps={steps}")
        loop.train(tiny.MODEL, config, FakeEngine(), tmp_path / "log", initial_weights=tmp_path / "given")
        assert closed == {"given", "log"}


def test_a_vocabulary_too_small_for_the_tokenizer_is_refused(data, tmp_path):
    """Ids beyond the embedding never reach a program."""
    small = overrides.apply(tiny.tiny_language_model(data), ["model.target_vocabulary=50"])
    with pytest.raises(UserError, match="target tokenizer .* has .* pieces, the model's target_vocabulary is 50"):
        loop.train("tiny", small, Engine(2, "cpu"), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_second_training_in_one_log_directory_is_refused(data, tmp_path, monkeypatch):
    """Before it compiles, and the first one's save in progress stays; once the first has ended, it trains."""
    experiment, saving = (
        tiny.tiny_language_model(data, *_schedule(1)),
        tmp_path / "checkpoints" / "12.orbax-checkpoint-tmp",
    )
    saving.mkdir(parents=True)
    monkeypatch.setattr(logdir_lock, "_ENDING_SECONDS", 0)
    with logdir_lock.locked(tmp_path), pytest.raises(UserError, match=f"--logdir={tmp_path}: another process trains"):
        loop.train("tiny", experiment, tiny.Uncompiled(2, "cpu"), tmp_path)
    assert saving.exists()
    loop.train("tiny", experiment, Engine(2, "cpu"), tmp_path)
    assert not saving.exists() and Checkpoints(tmp_path).latest() == 1
