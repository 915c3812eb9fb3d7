"""One life of a training: its processes started, watched, and one of them ended at a chosen moment."""

from __future__ import annotations

import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from lingvo_moe.errors import UserError
from lingvo_moe.lazy import tf
from lingvo_moe.training.checkpoint import Checkpoints
from lingvo_moe.training.checkpoint_manifest import MANIFEST
from tools.soak import stacks, trainer
from tools.soak.faults import AIMS, TERMINATE, Fault

# What is started; tests have a trainee of their own.
TRAINEE = (sys.executable, "-m", "tools.soak.trainer")
_REPOSITORY = pathlib.Path(__file__).parents[2]
_SECONDS_BETWEEN_LOOKS = 0.001
_MET = "compiling"
_SECONDS_TO_TELL = 1.0
# Nothing that a life waits for takes so long, on a slow machine with a busy disk.
PATIENCE = 600.0
# SIGKILL is instantaneous; SIGTERM finishes the step and saves, for training.grace_seconds at most. Another process has
# BOUND_SECONDS to notice.
SECONDS_TO_END = 60.0


class Life:
    """A training, from its start to its end, which comes when the context is left at the latest: one process, or several.

    Attributes:
      started: when, of time.monotonic.
      died_telling: whether a process died of being asked where it stood, of which `faulthandler` warns: it reads the stacks of
        threads that run on. That, too, is a sudden death at some moment.
    """

    died_telling = False

    def __init__(
        self, arguments: Sequence[str], logdir: pathlib.Path, directory: pathlib.Path, name: str, count: int = 1
    ):
        """Starts `train` with these arguments.

        Args:
          arguments: flags.
          logdir: that they name.
          directory: where files are written of what each process says, and of its stacks.
          name: what those files' names begin with.
          count: of processes.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self._logdir, self._curves_before = logdir, set(_curve_files(logdir))
        self._trace: _Trace | None = None
        self.started = time.monotonic()
        self._members = [
            _Member([*arguments, *joining], directory, f"{name}.{index}")
            for index, joining in enumerate(_joining(count))
        ]

    def __enter__(self) -> Life:
        return self

    def __exit__(self, kind, value, traceback):
        for member in self._members:
            member.process.kill()
            member.process.wait()

    @property
    def step(self) -> int:
        """The last step in the curves of this life; 0 before the first."""
        if self._trace is None:
            new = set(_curve_files(self._logdir)) - self._curves_before
            if not new:
                return 0
            self._trace = _Trace(min(new))
        return self._trace.last()

    @property
    def said(self) -> str:
        """All that was written to standard output and standard error, the first process's before another one's."""
        return "".join(member.said.read_text(encoding="utf-8", errors="replace") for member in self._members)

    @property
    def statuses(self) -> list[int | None]:
        """The exit statuses; None while a process runs."""
        return [member.process.poll() for member in self._members]

    def await_step(self, step: int):
        """Returns once the step has been made, or a process has ended."""
        self._await(lambda: self.step >= step, f"step {step}")

    def await_moment(self, fault: Fault, step: int, evaluate_every: int, start_seconds: float):
        """Returns at the moment that a fault is for.

        Args:
          fault: whose.
          step: to be made first.
          evaluate_every: steps between evaluations.
          start_seconds: how long a start takes.
        """
        longest = AIMS[fault.aim][1]
        if longest is None:
            if len(self._members) > 1:  # until they have met, one waits minutes for another that may still be coming
                self._await(lambda: _MET in self.said, _MET)
            time.sleep(fault.delay * start_seconds)
            return
        self.await_step(step)
        if fault.aim == "save":
            self._await(lambda: any(_partial(self._logdir)), "a temporary directory")
        elif fault.aim == "seal":
            self._await(lambda: any(_without_manifest(self._logdir)), "a checkpoint without a manifest")
        elif fault.aim == "evaluation":
            self.await_step(-(-step // evaluate_every) * evaluate_every)
        time.sleep(fault.delay * longest)

    def chosen(self, fault: Fault) -> int:
        """Which process a fault is for."""
        return int(fault.process * len(self._members))

    def place(self, index: int) -> stacks.Place:
        """Where a process stands."""
        member = self._members[index]
        if not member.stacks.exists():
            return stacks.place("")
        member.process.send_signal(signal.SIGUSR1)
        deadline, dump = time.monotonic() + _SECONDS_TO_TELL, ""
        while member.process.poll() is None and time.monotonic() < deadline and not stacks.is_whole(dump):
            time.sleep(_SECONDS_BETWEEN_LOOKS)
            dump = member.stacks.read_text(encoding="utf-8")
        self.died_telling = member.process.poll() == -signal.SIGSEGV and not stacks.is_whole(dump)
        return stacks.place(dump)

    def end(self, kind: str, index: int) -> float:
        """Sends the signal to one process; returns how many seconds it took all to end."""
        self._members[index].process.send_signal(signal.SIGTERM if kind == TERMINATE else signal.SIGKILL)
        return self.await_end(SECONDS_TO_END)

    def await_end(self, seconds: float = PATIENCE) -> float:
        """Returns after how many seconds all had ended by themselves; raises UserError where one did not."""
        start = time.monotonic()
        try:
            for member in self._members:
                member.process.wait(max(0.0, start + seconds - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise UserError(f"a process did not end within {seconds:g} s; what it said: {member.said}") from None
        return time.monotonic() - start

    def _await(self, condition: Callable[[], bool], what: str):
        deadline = time.monotonic() + PATIENCE
        while set(self.statuses) == {None} and not condition():
            if time.monotonic() > deadline:
                raise UserError(f"{what} did not come within {PATIENCE:g} s; what was said: {self._members[0].said}")
            time.sleep(_SECONDS_BETWEEN_LOOKS)


class _Member:
    """One process, and the files that it writes to."""

    def __init__(self, arguments: Sequence[str], directory: pathlib.Path, name: str):
        self.said, self.stacks = directory / f"{name}.log", directory / f"{name}.stacks"
        # Programs that were compiled before are kept there; a kill may hit the cache as well.
        environment = {
            **os.environ,
            "XDG_CACHE_HOME": str(directory / "cache"),
            trainer.VARIABLE: str(self.stacks),
            "PYTHONPATH": os.pathsep.join([str(_REPOSITORY), *filter(None, sys.path)]),
        }
        with open(self.said, "wb") as log:
            self.process = subprocess.Popen([*TRAINEE, "train", *arguments], stderr=log, stdout=log, env=environment)


def _joining(count: int) -> list[list[str]]:
    """By process, the flags with which it meets the others."""
    if count == 1:
        return [[]]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return [[f"--coordinator=127.0.0.1:{port}", f"--processes={count}", f"--process={index}"] for index in range(count)]


class _Trace:
    """The steps in a file of curves that somebody is writing."""

    def __init__(self, path: pathlib.Path):
        _ = tf.version  # TensorBoard would import it with all its reports
        from tensorboard.backend.event_processing import event_file_loader

        self._loader, self._step = event_file_loader.EventFileLoader(str(path)), 0

    def last(self) -> int:
        for event in self._loader.Load():
            self._step = max(self._step, event.step)
        return self._step


def complete(logdir: pathlib.Path) -> list[int]:
    """The steps whose checkpoints have their manifest, oldest first."""
    checkpoints = Checkpoints(logdir)
    return [step for step in checkpoints.steps() if (checkpoints.path(step) / MANIFEST).exists()]


def _without_manifest(logdir: pathlib.Path) -> list[int]:
    checkpoints = Checkpoints(logdir)
    return [step for step in checkpoints.steps()[-1:] if not (checkpoints.path(step) / MANIFEST).exists()]


def _partial(logdir: pathlib.Path) -> list[pathlib.Path]:
    return list((logdir / "checkpoints").glob("*.orbax-checkpoint-tmp*"))


def _curve_files(logdir: pathlib.Path) -> list[pathlib.Path]:
    return list((logdir / "train").glob("events.*"))
