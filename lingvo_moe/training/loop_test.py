"""Training resumes bit for bit after a crash, stops when asked, keeps what it promised, and names what is wrong."""

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
from lingvo_moe.testing import experiments as tiny
from lingvo_moe.training import loop
from lingvo_moe.training.checkpoint import Checkpoints

_REPOSITORY = pathlib.Path(loop.__file__).parents[2]
# `python -m lingvo_moe`, with as many devices to choose from as here: so it finds what was compiled here.
_MAIN = (
    "import jax, runpy; jax.config.update('jax_num_cpu_devices', 8); jax.devices(); "
    "runpy.run_module('lingvo_moe', run_name='__main__', alter_sys=True)"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> tiny.Data:
    return tiny.make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module", autouse=True)
def compiled_once():
    with pytest.MonkeyPatch.context() as patch:
        tiny.compile_once(patch)
        yield


def _losses(logdir: pathlib.Path, run: str = "train") -> dict[int, float]:
    """Every loss by step; a step that was reported twice must have been reported the same."""
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
        *tiny.settings(*changes),
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


def test_a_killed_run_goes_on_as_if_nothing_had_happened(data, tmp_path):
    """SIGKILL at an arbitrary step, SIGTERM in the next run, a third to the end: the losses of one uninterrupted run."""
    steps, whole, torn = 80, tmp_path / "whole", tmp_path / "torn"
    schedule = (f"training.steps={steps}", f"training.checkpoint_every={steps}", "training.evaluate_every=0")
    loop.train(tiny.MODEL, tiny.tiny(data, *schedule), Engine(2, "cpu"), whole)
    expected = _losses(whole)
    assert sorted(expected) == list(range(1, steps + 1))

    process = _start(_command(data, torn, steps))
    _wait_for(torn / "checkpoints" / "8", process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    reached = Checkpoints(torn).latest()
    assert 8 <= reached < steps

    process = _start(_command(data, torn, steps))
    _wait_for(torn / "checkpoints" / str(reached + 8), process)
    process.send_signal(signal.SIGTERM)
    said = process.communicate()[1]
    assert process.returncode == 130 and "with a checkpoint" in said and f"resuming from step {reached}" in said
    stopped = Checkpoints(torn).latest()
    assert reached + 8 <= stopped < steps and stopped == max(_losses(torn)), (
        "the step in progress is saved, none is lost"
    )

    process = _start(_command(data, torn, steps))
    said = process.communicate()[1]
    assert process.returncode == 0, said
    assert _losses(torn) == expected


def test_a_finished_run_says_so_and_changes_nothing(data, tmp_path, caplog):
    """Running the same command again is harmless; keep-N holds; the held-out loss is measured when it is due."""
    caplog.set_level(logging.INFO, "lingvo_moe")
    experiment = tiny.tiny(data, *_schedule(12))
    metrics = loop.train("tiny", experiment, Engine(2, "cpu"), tmp_path)
    assert np.isfinite(metrics["valid/cross_entropy"]) and metrics["rejected_pairs"] == 0
    assert {"aux_loss", "overflow", "expert_load", "tokens_per_second"} <= set(metrics)
    assert 0 < metrics["padding/source"] < 1 and 0 < metrics["padding/target"] < 1
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["12", "8"]
    assert sorted(_losses(tmp_path, "valid")) == [6, 12]
    before = _losses(tmp_path)
    assert loop.train("tiny", experiment, Engine(2, "cpu"), tmp_path) == {}
    assert "already been trained for 12 steps" in caplog.messages[-1] and _losses(tmp_path) == before


def test_training_that_nothing_can_save_ends_and_keeps_what_it_had(data, tmp_path, monkeypatch):
    """Weights that blew up: from then on every step is skipped, until that has happened too often."""
    make = Training.train

    def make_and_blow_up(self, batches):
        metrics = make(self, batches)
        if int(np.asarray(self.state["step"])) == 6:
            blown_up = tree.map_leaves(lambda weight: np.array(weight) * np.float32(1e30), self.state["theta"])
            self.load(self.state | {"theta": blown_up})
        return metrics

    monkeypatch.setattr(Training, "train", make_and_blow_up)
    wild = tiny.tiny(data, *_schedule(40), "training.max_skipped=5")
    with pytest.raises(UserError, match=r"the loss of step 11 is (nan|inf).*5 steps in a row changed no weight"):
        loop.train("tiny", wild, Engine(2, "cpu"), tmp_path)
    skipped = [max(values) for _, values in sorted(tiny.curves(tmp_path)["skipped_in_a_row"].items())]
    assert skipped[-6:] == [0, 1, 2, 3, 4, 5] or skipped[-6:] == [1, 2, 3, 4, 5, 6], skipped
    assert Checkpoints(tmp_path).latest()


def test_many_steps_in_one_call_make_the_same_losses(data, tmp_path):
    """And where a loop of three is cut short by the end, the next run makes it whole."""
    schedule = ("training.checkpoint_every=6", "training.evaluate_every=0", "training.log_every=3")
    for logdir, changes, ends in (("one", (), (10,)), ("three", ("training.steps_per_loop=3",), (4, 10))):
        for end in ends:
            config = tiny.tiny(data, *schedule, *changes, f"training.steps={end}")
            loop.train("tiny", config, Engine(2, "cpu"), tmp_path / logdir)
    one, three = _losses(tmp_path / "one"), _losses(tmp_path / "three")
    assert sorted(one) == [3, 6, 9, 10] and sorted(three) == [3, 4, 6, 9, 10]
    assert {step: three[step] for step in one} == one


def test_a_checkpoint_of_another_model_is_refused_and_kept(data, tmp_path):
    """Neither training nor the checkpoint that is there is damaged by a wrong --model."""
    experiment = tiny.tiny(data, *_schedule(4))
    loop.train("tiny", experiment, Engine(2, "cpu"), tmp_path)
    other = overrides.apply(experiment, ["model.num_experts=8", "training.steps=8"])
    with pytest.raises(
        UserError, match=r"holds tiny, whose weights are not those of other: .*gate is .*4\] there, .*8\] here"
    ):
        loop.train("other", other, Engine(2, "cpu"), tmp_path)
    assert Checkpoints(tmp_path).latest() == 4


def test_a_vocabulary_too_small_for_the_tokenizer_is_named(data, tmp_path):
    """Ids beyond the embedding never reach a program."""
    small = overrides.apply(tiny.tiny(data), ["model.target_vocabulary=50"])
    with pytest.raises(UserError, match="target tokenizer .* has .* pieces, the model's target_vocabulary is 50"):
        loop.train("tiny", small, Engine(2, "cpu"), tmp_path)
    assert not list(tmp_path.iterdir())
