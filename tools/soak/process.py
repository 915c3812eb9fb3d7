"""The processes of a training run: started, watched, and one of them ended at a chosen moment."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from lingvo_moe.errors import UserError
from lingvo_moe.lazy import tf
from lingvo_moe.training.checkpoint import Checkpoints
from lingvo_moe.training.checkpoint_manifest import MANIFEST
from lingvo_moe.utils import free_ports
from tools.soak import stacks, trainer
from tools.soak.faults import AIMS, TERMINATE, Fault

# The program that is started; tests have a trainer of their own.
TRAINER = (sys.executable, "-m", "tools.soak.trainer")
_REPOSITORY = pathlib.Path(__file__).parents[2]
_POLL_SECONDS = 0.001
_CONNECTED = "compiling"  # logged once all processes are connected
_DUMP_SECONDS = 1.0
# Longer than anything takes on a slow machine with a busy disk.
TIMEOUT_SECONDS = 600.0
# SIGKILL is instantaneous; SIGTERM finishes the step and saves, for training.grace_seconds at most. Other processes
# have BOUND_SECONDS to notice.
END_SECONDS = 60.0


class TrainingProcesses:
    """The processes of one start of a training run; they are killed at the latest when the context is left.

    Attributes:
      started: time of the start, of time.monotonic.
      crashed_in_dump: whether a process crashed while it dumped its stacks. `faulthandler` warns of that, as it reads
        the stacks of running threads; it counts as a sudden death.
    """

    crashed_in_dump = False

    def __init__(
        self, arguments: Sequence[str], logdir: pathlib.Path, directory: pathlib.Path, name: str, count: int = 1
    ):
        """Starts `train` with these arguments.

        Args:
          arguments: flags.
          logdir: the log directory that they name.
          directory: directory of the processes' logs and stack dumps.
          name: prefix of those files' names.
          count: number of processes.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self._logdir, self._curves_before = logdir, set(_curve_files(logdir))
        self._curves: _Curves | None = None
        self.started = time.monotonic()
        self._processes = [
            _Process([*arguments, *flags], directory, f"{name}.{index}")
            for index, flags in enumerate(_process_flags(count))
        ]

    def __enter__(self) -> TrainingProcesses:
        return self

    def __exit__(self, kind, value, traceback):
        for process in self._processes:
            process.popen.kill()
            process.popen.wait()

    @property
    def step(self) -> int:
        """The last step in the curves since this start; 0 before the first."""
        if self._curves is None:
            new = set(_curve_files(self._logdir)) - self._curves_before
            if not new:
                return 0
            self._curves = _Curves(min(new))
        return self._curves.last()

    @property
    def output(self) -> str:
        """Standard output and standard error of all processes, in their order."""
        return "".join(process.log.read_text(encoding="utf-8", errors="replace") for process in self._processes)

    @property
    def statuses(self) -> list[int | None]:
        """The exit statuses; None while a process runs."""
        return [process.popen.poll() for process in self._processes]

    def await_step(self, step: int):
        """Waits until the step has been made or a process has ended."""
        self._await(lambda: self.step >= step, f"step {step}")

    def await_moment(self, fault: Fault, step: int, evaluate_every: int, start_seconds: float):
        """Waits for the moment of a fault.

        Args:
          fault: the fault.
          step: the step to be made first.
          evaluate_every: steps between evaluations.
          start_seconds: duration of a start.
        """
        longest = AIMS[fault.aim][1]
        if longest is None:
            if len(self._processes) > 1:  # before, a process waits minutes for another that may still start
                self._await(lambda: _CONNECTED in self.output, _CONNECTED)
            time.sleep(fault.delay * start_seconds)
            return
        self.await_step(step)
        if fault.aim == "save":
            self._await(lambda: any(_partial(self._logdir)), "temporary directory")
        elif fault.aim == "manifest":
            self._await(lambda: any(_without_manifest(self._logdir)), "checkpoint without a manifest")
        elif fault.aim == "evaluation":
            self.await_step(-(-step // evaluate_every) * evaluate_every)
        time.sleep(fault.delay * longest)

    def chosen(self, fault: Fault) -> int:
        """Returns the index of the process that a fault hits."""
        return int(fault.process * len(self._processes))

    def phase(self, index: int) -> stacks.Phase:
        """Returns what a process is doing."""
        process = self._processes[index]
        if not process.stacks.exists():
            return stacks.phase("")
        process.popen.send_signal(signal.SIGUSR1)
        deadline, dump = time.monotonic() + _DUMP_SECONDS, ""
        while process.popen.poll() is None and time.monotonic() < deadline and not stacks.is_complete(dump):
            time.sleep(_POLL_SECONDS)
            dump = process.stacks.read_text(encoding="utf-8")
        self.crashed_in_dump = process.popen.poll() == -signal.SIGSEGV and not stacks.is_complete(dump)
        return stacks.phase(dump)

    def end(self, kind: str, index: int) -> float:
        """Sends the signal to one process; returns the seconds until all have ended."""
        self._processes[index].popen.send_signal(signal.SIGTERM if kind == TERMINATE else signal.SIGKILL)
        return self.await_end(END_SECONDS)

    def await_end(self, seconds: float = TIMEOUT_SECONDS) -> float:
        """Waits until all have ended; returns the seconds. Raises UserError if one does not end in time."""
        start = time.monotonic()
        for process in self._processes:
            try:
                process.popen.wait(max(0.0, start + seconds - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise UserError(f"a process did not end within {seconds:g} s; its log: {process.log}") from None
        return time.monotonic() - start

    def _await(self, condition: Callable[[], bool], what: str):
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while set(self.statuses) == {None} and not condition():
            if time.monotonic() > deadline:
                raise UserError(f"no {what} within {TIMEOUT_SECONDS:g} s; log: {self._processes[0].log}")
            time.sleep(_POLL_SECONDS)


class _Process:
    """One process, its log and its stack dump."""

    def __init__(self, arguments: Sequence[str], directory: pathlib.Path, name: str):
        self.log, self.stacks = directory / f"{name}.log", directory / f"{name}.stacks"
        # The cache of compiled programs; a kill may hit its writing as well.
        environment = {
            **os.environ,
            "LINGVO_MOE_CACHE": str(directory / "cache"),
            trainer.VARIABLE: str(self.stacks),
            "PYTHONPATH": os.pathsep.join([str(_REPOSITORY), *filter(None, sys.path)]),
        }
        with open(self.log, "wb") as log:
            self.popen = subprocess.Popen([*TRAINER, "train", *arguments], stderr=log, stdout=log, env=environment)


def _process_flags(count: int) -> list[list[str]]:
    """Returns the flags of each process that connect it to the others."""
    if count == 1:
        return [[]]
    coordinator = free_ports.address()
    return [[f"--coordinator={coordinator}", f"--processes={count}", f"--process={index}"] for index in range(count)]


class _Curves:
    """The steps in an event file that is being written."""

    def __init__(self, path: pathlib.Path):
        _ = tf.version  # imported by TensorBoard, it would print its messages
        from tensorboard.backend.event_processing import event_file_loader

        self._loader, self._step = event_file_loader.EventFileLoader(str(path)), 0

    def last(self) -> int:
        for event in self._loader.Load():
            self._step = max(self._step, event.step)
        return self._step


def complete(logdir: pathlib.Path) -> list[int]:
    """Returns the steps whose checkpoints have a manifest, oldest first."""
    checkpoints = Checkpoints(logdir)
    return [step for step in checkpoints.steps() if (checkpoints.path(step) / MANIFEST).exists()]


def _without_manifest(logdir: pathlib.Path) -> list[int]:
    checkpoints = Checkpoints(logdir)
    return [step for step in checkpoints.steps()[-1:] if not (checkpoints.path(step) / MANIFEST).exists()]


def _partial(logdir: pathlib.Path) -> list[pathlib.Path]:
    return list((logdir / "checkpoints").glob("*.orbax-checkpoint-tmp*"))


def _curve_files(logdir: pathlib.Path) -> list[pathlib.Path]:
    return list((logdir / "train").glob("events.*"))
