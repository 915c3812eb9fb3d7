"""The launcher's processes train one model; it forwards signals, names the first to fail and leaves none behind."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from lingvo_moe.cli import app
from lingvo_moe.engines.pjrt import Engine
from lingvo_moe.sharding.layout import DeviceMesh
from lingvo_moe.testing import experiments as tiny
from lingvo_moe.testing import harness
from lingvo_moe.training import loop
from tools import launch_processes

pytestmark = pytest.mark.slow

_REPOSITORY = pathlib.Path(launch_processes.__file__).parents[1]
_READY = "print('ready', file=sys.stderr, flush=True)"


def _run(*programs: str) -> int:
    return launch_processes.run([[sys.executable, "-c", f"import os, signal, sys, time\n{code}"] for code in programs])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no --model among the flags of train"),
        (["--", "--steps=3"], "no --model"),
        (["--", "--models=m4.Small"], "no --model"),
        (["--", "-model=m4.Small", "-process=3"], "-process=3 after --"),
        (["--", "--model=m4.Small", "--processes=3"], "--processes=3 after --: the launcher passes that itself"),
        (["--", "--model=m4.Small", "--coordinator=x:1"], "--coordinator=x:1 after --"),
    ],
)
def test_mistakes_are_reported_before_anything_is_started(arguments, message, capsys):
    assert app.execute(launch_processes.main, ["launch_processes", *arguments], launch_processes._VALUES) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["-model=m4.Small", "--logdir=log", "--flagfile=flags"])
def test_what_train_accepts_is_started(monkeypatch, flag):
    """A flag with one dash; a log directory, or a file of flags, that has the model."""
    started = []
    monkeypatch.setattr(launch_processes, "run", lambda commands: started.extend(commands) or 0)
    arguments = ["launch_processes", "--", flag]
    assert app.execute(launch_processes.main, arguments, launch_processes._VALUES) == 0
    assert len(started) == 2 and all(flag in command for command in started)


def test_the_process_that_failed_is_named_and_the_others_are_killed(monkeypatch, capsys):
    """Not those that ended because of it; the status is that of the killed process, as a shell counts it."""
    monkeypatch.setattr(launch_processes, "_PATIENCE_SECONDS", 0.5)
    start = time.monotonic()
    status = _run(
        "time.sleep(0.3); sys.exit(3)",
        "print('a line', file=sys.stderr); os.kill(os.getpid(), signal.SIGKILL)",
        "time.sleep(60)",
    )
    assert status == 128 + signal.SIGKILL and time.monotonic() - start < 20
    errors = capsys.readouterr().err
    assert "[1] a line\n" in errors and errors.endswith("process 1 of 3 was killed by SIGKILL.\n")


def test_signals_are_forwarded_once(capsys):
    """All processes stop with a checkpoint, which is no failure to report."""
    stops = f"signal.signal(signal.SIGTERM, lambda *_: sys.exit(130)); {_READY}; time.sleep(60)"
    threading.Timer(2.0, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    assert _run(stops, stops) == 130 and "process" not in capsys.readouterr().err


def test_two_processes_make_the_losses_of_one_with_as_many_devices(tmp_path, monkeypatch):
    """Two devices each; gloo adds in another order than one process does, see `testing.translation.TOLERANCE`.

    The two find in the cache what the one has lowered; each compiles it, with few optimizations.
    """
    data = tiny.make_data(tmp_path / "data")
    changes, mesh = ("training.evaluate_every=4", "training.checkpoint_every=4"), DeviceMesh((2, 2))
    tiny.compile_once(monkeypatch)
    config = tiny.tiny_language_model(data, *changes, "training.steps=4", mesh=mesh)
    loop.train(tiny.LANGUAGE_MODEL, config, Engine(mesh.size, "cpu"), tmp_path / "one")

    train_flags = [flag for flag in tiny.language_model_settings(*changes) if not flag.startswith("--devices")]
    command = [
        sys.executable,
        "-m",
        "tools.launch_processes",
        "--processes=2",
        "--",
        *train_flags,
        f"--mesh={mesh}",
        "--steps=4",
        "--platform=cpu",
        f"--corpus={data.corpus}",
        f"--tokenizers={data.tokenizers}",
        f"--logdir={tmp_path / 'two'}",
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, cwd=_REPOSITORY, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0 and not done.stdout and done.stderr.count("trained for 4 steps") == 1, done.stderr
    for run, steps in (("train", [1, 2, 3, 4]), ("valid", [4])):
        found, expected = (tiny.curves(tmp_path / name, run)["cross_entropy"] for name in ("two", "one"))
        assert sorted(found) == sorted(expected) == steps
        np.testing.assert_allclose(
            [max(found[step]) for step in steps],
            [max(expected[step]) for step in steps],
            rtol=64 * harness.FLOAT32_ROUNDING,
        )
