"""Training resumes bit for bit after a crash, stops when asked, keeps what it promised, and names what is wrong."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from lingvo_moe import testing_experiment as tiny
from lingvo_moe.engines.pjrt import Engine
from lingvo_moe.errors import UserError
from lingvo_moe.layout import DeviceMesh
from lingvo_moe.lazy import tf
from lingvo_moe.training import loop
from lingvo_moe.training.checkpoint import Checkpoints

_REPOSITORY = pathlib.Path(loop.__file__).parents[2]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> tiny.Data:
    return tiny.make_data(tmp_path_factory.mktemp("data"))


def _losses(logdir: pathlib.Path, run: str = "train") -> dict[int, float]:
    """Every loss in the event files by step; a step that was reported twice must have been reported the same."""
    losses: dict[int, float] = {}
    for path in sorted((logdir / run).glob("events.*")):
        for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
            event = tf.compat.v1.Event.FromString(record)
            for value in event.summary.value:
                if value.tag == "cross_entropy":
                    loss = float(tf.make_ndarray(value.tensor))
                    assert losses.setdefault(event.step, loss) == loss
    return losses


def _command(data: tiny.Data, logdir: pathlib.Path, steps: int) -> list[str]:
    return [sys.executable, "-m", "lingvo_moe", "train", *tiny.flags(data), f"--corpus={data.corpus}", f"--logdir={logdir}",
            "--devices=2", "--platform=cpu", f"--steps={steps}", "--set=training.log_every=1",
            "--set=training.checkpoint_every=4", "--set=training.evaluate_every=0"]


def _start(command: list[str]) -> subprocess.Popen:
    return subprocess.Popen(command, cwd=_REPOSITORY, stderr=subprocess.PIPE, text=True,
                            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})


def _wait_for(path: pathlib.Path, process: subprocess.Popen):
    while not path.exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)


def test_a_killed_run_goes_on_as_if_nothing_had_happened(data, tmp_path):
    """SIGKILL at an arbitrary step, SIGTERM in the next run, a third to the end: the losses of one uninterrupted run."""
    steps, whole, torn = 240, tmp_path / "whole", tmp_path / "torn"
    uninterrupted = _start(_command(data, whole, steps))
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
    assert process.returncode == 130 and "with a checkpoint" in said and f"going on from step {reached}" in said
    stopped = Checkpoints(torn).latest()
    assert reached + 8 <= stopped < steps and stopped == max(_losses(torn)), "the step in progress is saved, none is lost"

    assert _start(_command(data, torn, steps)).communicate() and uninterrupted.communicate()
    expected = _losses(whole)
    assert sorted(expected) == list(range(1, steps + 1))
    assert _losses(torn) == expected


def test_a_finished_run_says_so_and_changes_nothing(data, tmp_path):
    """Running the same command again is harmless; keep-N holds; the held-out loss is measured when it is due."""
    experiment, said = tiny.tiny(data), []
    metrics = loop.train("tiny", experiment, Engine(2, "cpu"), tmp_path, say=said.append)
    assert np.isfinite(metrics["valid/cross_entropy"]) and {"aux_loss", "overflow", "expert_load", "padding"} <= set(metrics)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["12", "8"]
    assert sorted(_losses(tmp_path, "valid")) == [6, 12]
    before = _losses(tmp_path)
    assert loop.train("tiny", experiment, Engine(2, "cpu"), tmp_path, say=said.append) == {}
    assert "already been trained for 12 steps" in said[-1] and _losses(tmp_path) == before


def test_a_checkpoint_of_another_model_is_refused_and_kept(data, tmp_path):
    """Neither training nor the checkpoint that is there is damaged by a wrong --model."""
    experiment = tiny.tiny(data, steps=4)
    loop.train("tiny", experiment, Engine(2, "cpu"), tmp_path, say=lambda line: None)
    from lingvo_moe import overrides
    other = overrides.apply(experiment, ["model.num_experts=8", "training.steps=8"])
    with pytest.raises(UserError, match=r"holds tiny, whose weights are not those of other: .*gate is .*4\] there, .*8\] here"):
        loop.train("other", other, Engine(2, "cpu"), tmp_path, say=lambda line: None)
    assert Checkpoints(tmp_path).latest() == 4


def test_a_state_moves_between_meshes_value_for_value(data, tmp_path):
    """Saved on two devices, restored on one and on 2x2: every weight and slot is equal."""
    import jax
    from lingvo_moe import tree
    experiment = tiny.tiny(data)
    steps = experiment.steps
    state = Engine(2, "cpu").load(steps.init())({"seed": np.array([0, 5], np.int32)})["state"]
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save("tiny", state, {"next": 7, "waiting": []})
    checkpoints.close()
    specs = steps.state_specs()
    for mesh in (DeviceMesh((1,)), DeviceMesh((2, 2))):
        init = Engine(mesh.size, "cpu").load(tiny.tiny(data, mesh).steps.init())
        shardings = init.output_shardings("state")
        saved = Checkpoints(tmp_path).restore("tiny", specs, shardings)
        assert saved.step == 0 and saved.data_state == {"next": 7, "waiting": []}
        for path, value in tree.flatten(state).items():
            restored = tree.flatten(saved.state)[path]
            assert isinstance(restored, jax.Array) and restored.sharding == tree.flatten(shardings)[path]
            np.testing.assert_array_equal(np.asarray(restored), np.asarray(value))


def test_a_full_disk_is_one_clear_error_and_older_checkpoints_stay(data, tmp_path, monkeypatch):
    """What was saved before restores after a save that failed."""
    import errno
    experiment = tiny.tiny(data)
    state = Engine(2, "cpu").load(experiment.steps.init())({"seed": np.array([0, 5], np.int32)})["state"]
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save("tiny", state, None)
    checkpoints.wait()

    def no_space(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoints._manager, "save", no_space)
    with pytest.raises(UserError, match="could not be written .*No space left.*Make room"):
        checkpoints.save("tiny", dict(state, step=np.int32(4)), None)
    assert Checkpoints(tmp_path).latest() == 0


def test_a_vocabulary_too_small_for_the_tokenizer_is_named(data, tmp_path):
    """Ids beyond the embedding never reach a program."""
    from lingvo_moe import overrides
    small = overrides.apply(tiny.tiny(data), ["model.target_vocabulary=50"])
    with pytest.raises(UserError, match="target tokenizer .* has .* pieces, the model's target_vocabulary is 50"):
        loop.train("tiny", small, Engine(2, "cpu"), tmp_path)
    assert not list(tmp_path.iterdir())


def test_no_checkpoint_names_the_command_that_makes_one(data, tmp_path):
    """A wrong --logdir is told by name, with the remedy."""
    with pytest.raises(UserError, match="no checkpoint. Train first: python -m lingvo_moe train --model=tiny"):
        Checkpoints(tmp_path).require("tiny", {})
