"""Several processes train as one does; when one is killed, none hangs, and the next run resumes from a checkpoint.

Each process reads its own data and writes its own files.
"""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import numpy as np
import pytest

from lingvo_moe.distributed import watchdog
from lingvo_moe.engines.pjrt import Engine
from lingvo_moe.testing import experiments as tiny
from lingvo_moe.training import checkpoint_tools, loop
from lingvo_moe.training.checkpoint import Checkpoints
from lingvo_moe.training.checkpoint_reader import Reader
from lingvo_moe.utils import free_ports

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_once")]

_REPOSITORY = pathlib.Path(loop.__file__).parents[2]
_CHANGES = ("training.checkpoint_every=4", "training.evaluate_every=8")


def _alone(data: tiny.Data, logdir: pathlib.Path, steps: int):
    """Trains in this process, on two of its devices."""
    config = tiny.tiny_language_model(data, *_CHANGES, f"training.steps={steps}")
    loop.train(tiny.LANGUAGE_MODEL, config, Engine(2, "cpu"), logdir)


def _start(
    data: tiny.Data, logdir: pathlib.Path, steps: int, *flags: str, settings: Sequence[str] = ()
) -> list[subprocess.Popen]:
    """Starts two processes with one device each; `settings` choose another model than `_alone`'s."""
    command = [
        sys.executable,
        "-m",
        "lingvo_moe",
        "train",
        *(settings or tiny.language_model_settings(*_CHANGES)),
        f"--corpus={data.corpus}",
        f"--tokenizers={data.tokenizers}",
        f"--logdir={logdir}",
        "--platform=cpu",
        f"--steps={steps}",
        f"--coordinator={free_ports.address()}",
        "--processes=2",
        *flags,
    ]
    return [
        subprocess.Popen(
            [*command, f"--process={index}"],
            cwd=_REPOSITORY,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for index in (0, 1)
    ]


def _await_stderr(started: list[subprocess.Popen], status: int | None = 0) -> list[str]:
    stderr = [process.communicate(timeout=900)[1] for process in started]
    assert status is None or [process.returncode for process in started] == [status] * 2, stderr
    return stderr


def _losses(logdir: pathlib.Path, run: str = "train") -> dict[int, float]:
    """Returns every loss by step; a step that was made twice must have been reported with the same loss."""
    found = tiny.curves(logdir, run)["cross_entropy"]
    assert all(len(values) == 1 for values in found.values())
    return {step: min(values) for step, values in found.items()}


def _is_measured(logdir: pathlib.Path, step: int) -> bool:
    """Returns whether the held-out loss of a step is in the curves, which may be in the middle of a write."""
    return (logdir / "valid").exists() and step in _losses(logdir, "valid")


def _assert_same_checkpoint(first: pathlib.Path, second: pathlib.Path, step: int):
    """Compares every array, the position in the data, and the metadata of the newest checkpoints."""
    ours, others = (Reader(Checkpoints(logdir).path(step)) for logdir in (first, second))
    assert Checkpoints(first).latest() == Checkpoints(second).latest() == step
    assert ours.meta == others.meta and ours.specs() == others.specs()
    for path in ours.specs():
        np.testing.assert_array_equal(ours.read(path), others.read(path), err_msg=path)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="on one core losses differ in their last bits")
def test_training_resumes_with_another_number_of_processes_after_a_kill(data, tmp_path):
    """Losses, weights and the position in the data equal, bit for bit, those of one undisturbed process.

    Any number of processes resumes from any other's checkpoint. With two devices an AllReduce adds two numbers, so the
    order of summation does not matter. The survivor of a kill ends at once, with one line and no traceback.
    """
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    _alone(data, tmp_path / "lowered", 8)  # the processes find the programs in the cache: each would lower them itself
    started = _start(data, torn, 1000)
    # The held-out loss that falls due with the checkpoint, too: one that a kill prevents is not measured later.
    while not ((torn / "checkpoints" / "8").exists() and _is_measured(torn, 8)):
        assert all(process.poll() is None for process in started), _await_stderr(started, None)
        time.sleep(0.02)
    started[1].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    stderr = _await_stderr(started, None)[0]
    assert time.monotonic() - killed < watchdog.BOUND_SECONDS and started[0].returncode == watchdog.EXIT_STATUS, stderr
    assert "process 1 of 2 is gone, so process 0 stops too; the same command resumes from the newest" in stderr
    assert "Traceback" not in stderr and "Gloo" not in stderr and "Check failure" not in stderr, stderr
    reached = Checkpoints(torn).latest()
    assert reached >= 8
    written = {path.name for path in (torn / "checkpoints" / str(reached) / "theta").glob("ocdbt.process_*")}
    assert written == {"ocdbt.process_0", "ocdbt.process_1"}, "each writes its own"

    steps = reached + 8
    _alone(data, torn, reached + 4)
    stderr = _await_stderr(_start(data, torn, steps))
    assert f"resuming from step {reached + 4}" in stderr[0] and "resuming" not in stderr[1], "one speaks for both"

    _alone(data, whole, steps)
    expected = _losses(whole)
    assert sorted(expected) == list(range(1, steps + 1))
    found = _losses(torn)
    assert {step: found[step] for step in expected} == expected
    valid = _losses(whole, "valid")
    assert valid and {step: _losses(torn, "valid").get(step) for step in valid} == valid
    _assert_same_checkpoint(whole, torn, steps)


def test_processes_start_with_the_weights_of_a_file(data, tmp_path):
    """Each reads the file itself; the losses are those of one process that starts with the same weights."""
    _alone(data, tmp_path / "given", 4)
    file = tmp_path / "given.safetensors"
    checkpoint_tools.to_safetensors(Checkpoints(tmp_path / "given"), 4, file)
    stderr = _await_stderr(_start(data, tmp_path / "two", 4, f"--initial_weights={file}"))
    assert f"starting with the weights of step 4 ({file})" in stderr[0], stderr
    config = tiny.tiny_language_model(data, *_CHANGES, "training.steps=4")
    engine, given = Engine(2, "cpu"), tmp_path / "given"
    loop.train(tiny.LANGUAGE_MODEL, config, engine, tmp_path / "one", initial_weights=given)
    one, two = (list(_losses(tmp_path / name).values()) for name in ("one", "two"))
    np.testing.assert_allclose(
        one, two, rtol=1e-5
    )  # a change of last bits in four steps; with random weights they are some percent apart


def test_translation_in_a_pipeline_over_the_border_of_processes_trains_as_in_one(data, tmp_path):
    """One stage of each stack in each process: losses, source gain and weights equal those of one, bit for bit.

    Before and after the stages each process has half of the rows, so it packs its own pairs of sentences. Dropout in
    stages, which `pipelines_test` compares, would take a quarter more time.
    """
    changes = ("layout=pipeline_data", "model.pipeline=gpipe", "model.stages=2", "model.microbatches=2")
    changes += ("model.num_layers=4", "model.layer_pattern=dense", "model.num_experts=0")
    changes += ("model.unroll=false", "model.remat=full", "model.residual_dropout=0")
    changes += ("training.checkpoint_every=4", "training.evaluate_every=4")
    divided, whole = tmp_path / "divided", tmp_path / "whole"
    loop.train(tiny.MODEL, tiny.tiny(data, *changes, "training.steps=4"), Engine(2, "cpu"), whole)
    _await_stderr(_start(data, divided, 4, settings=tiny.settings(*changes)))
    assert sorted(_losses(whole)) == [1, 2, 3, 4] and _losses(divided) == _losses(whole)
    gains = [tiny.curves(logdir, "valid")["source_gain"] for logdir in (divided, whole)]
    assert gains[0] == gains[1] and sorted(gains[0]) == [4]
    _assert_same_checkpoint(whole, divided, 4)


def test_both_stop_after_the_same_step_and_report_mistakes(data, tmp_path):
    """SIGTERM to one of them stops both, with a complete checkpoint; both report a wrong flag."""
    small = ("--set=model.num_experts=0", "--set=model.layer_pattern=dense", "--set=training.evaluate_every=0")
    started = _start(data, tmp_path / "log", 1000, "--set=input.batch_size=6", "--set=input.shards=1", *small)
    stderr = _await_stderr(started, None)
    # The watchdog's status is of a process whose peer was first.
    assert {process.returncode for process in started} <= {2, watchdog.EXIT_STATUS}
    assert all("rows" in words and "Traceback" not in words for words in stderr) and "--set input.shards=2" in "".join(
        stderr
    ), stderr
    started = _start(data, tmp_path / "log", 1000)
    while not (tmp_path / "log" / "checkpoints" / "4").exists():
        assert all(process.poll() is None for process in started), _await_stderr(started, None)
        time.sleep(0.02)
    started[1].send_signal(signal.SIGTERM)
    stderr = _await_stderr(started, 130)
    stopped = Checkpoints(tmp_path / "log").latest()
    assert f"stopped after step {stopped}, which is saved" in stderr[0]
    assert stopped == max(_losses(tmp_path / "log")) and not Checkpoints(tmp_path / "log").problems(stopped)
