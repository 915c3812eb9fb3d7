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
from lingvo_moe.training import loop, weights_conversion
from lingvo_moe.training.checkpoint import Checkpoints
from lingvo_moe.training.checkpoint_reader import Reader
from lingvo_moe.utils import free_ports
from lingvo_moe.utils.exit_status import PROCESS_LOST

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_once")]

_REPOSITORY = pathlib.Path(loop.__file__).parents[2]
_CHANGES = ("training.checkpoint_every=4", "training.evaluate_every=8")


def _alone(data: tiny.Data, logdir: pathlib.Path, steps: int, initial_weights: pathlib.Path | None = None):
    """Trains in this process, on two of its devices."""
    config = tiny.tiny_language_model(data, *_CHANGES, f"training.steps={steps}")
    loop.train(tiny.LANGUAGE_MODEL, config, Engine(2, "cpu"), logdir, initial_weights=initial_weights)


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


def _await_checkpoint(started: list[subprocess.Popen], logdir: pathlib.Path, step: int):
    """Waits until a step is saved, and its held-out loss written: one that a kill prevents is not computed later."""
    is_evaluated = step % 8 == 0
    while not ((logdir / "checkpoints" / str(step)).exists() and (not is_evaluated or _is_measured(logdir, step))):
        assert all(process.poll() is None for process in started), _await_stderr(started, None)
        time.sleep(0.02)


def _stop_one(started: list[subprocess.Popen], logdir: pathlib.Path) -> list[str]:
    """Sends SIGTERM to one of two; both stop with a complete checkpoint of the last step. Returns what they wrote."""
    started[1].send_signal(signal.SIGTERM)
    stderr = _await_stderr(started, 130)
    stopped = Checkpoints(logdir).latest()
    assert f"stopped after step {stopped}, which is saved" in stderr[0]
    assert stopped == max(_losses(logdir)) and not Checkpoints(logdir).problems(stopped)
    return stderr


def _kill_one(started: list[subprocess.Popen]) -> list[str]:
    """Sends SIGKILL to one of two; the other ends at once, with one line and no traceback. Returns what they wrote."""
    started[1].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    stderr = _await_stderr(started, None)
    assert time.monotonic() - killed < watchdog.BOUND_SECONDS and started[0].returncode == PROCESS_LOST, stderr
    assert "process 1 of 2 is gone, so process 0 stops too; the same command resumes from the newest" in stderr[0]
    assert not any(words in stderr[0] for words in ("Traceback", "Gloo", "Check failure")), stderr
    return stderr


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="on one core losses differ in their last bits")
def test_training_that_is_stopped_and_killed_resumes_with_another_number_of_processes(data, tmp_path):
    """Losses, weights and the position in the data equal, bit for bit, those of one undisturbed process.

    Two processes start with the weights of a file, which each reads itself; SIGTERM to one stops both. One process
    resumes, then two, of which one is killed, then one. With two devices an AllReduce adds two numbers, so the order of
    summation does not matter.
    """
    given, whole, torn = tmp_path / "given", tmp_path / "whole", tmp_path / "torn"
    _alone(data, given, 4)
    file = tmp_path / "given.safetensors"
    weights_conversion.to_safetensors(Checkpoints(given), 4, file)
    _alone(data, tmp_path / "lowered", 8)  # the processes find the programs in the cache: each would lower them itself

    started = _start(data, torn, 1000, f"--initial_weights={file}")
    _await_checkpoint(started, torn, 4)
    stderr = _stop_one(started, torn)
    assert f"starting with the weights of step 4 ({file})" in stderr[0] and "starting" not in stderr[1], "one speaks"

    resumed = Checkpoints(torn).latest() + 4
    _alone(data, torn, resumed)
    started = _start(data, torn, 1000)
    due = (resumed // 8 + 1) * 8
    _await_checkpoint(started, torn, due)
    stderr = _kill_one(started)
    assert f"resuming from step {resumed}" in stderr[0] and "resuming" not in stderr[1], "one speaks for both"
    reached = Checkpoints(torn).latest()
    assert reached >= due
    written = {path.name for path in (torn / "checkpoints" / str(reached) / "theta").glob("ocdbt.process_*")}
    assert written == {"ocdbt.process_0", "ocdbt.process_1"}, "each writes its own"

    steps = reached + 4
    _alone(data, torn, steps)
    _alone(data, whole, steps, given)
    expected = _losses(whole)
    assert sorted(expected) == list(range(1, steps + 1))
    found = _losses(torn)
    assert {step: found[step] for step in expected} == expected
    valid, evaluated = _losses(whole, "valid"), _losses(torn, "valid")
    # Not all of them, as a request to stop ends the evaluation that it finds.
    both = valid.keys() & evaluated.keys()
    assert {due, steps} <= both and all(valid[step] == evaluated[step] for step in both)
    _assert_same_checkpoint(whole, torn, steps)


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
