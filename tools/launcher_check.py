"""Trains a tiny model with two processes under each launcher that is installed here, and checks what comes of it.

    python -m tools.launcher_check [--directory=build/launchers] [--launchers=srun,mpirun,flags]

Under each launcher: training ends with the losses of one process; after SIGKILL of one process the whole job ends
within the bound; the same command resumes from the newest checkpoint, again with the losses of one process; SIGTERM to
one process stops both after the same step, with a checkpoint. `flags` stands for tools.launch_processes, which passes
the flags of a process started by hand. Status 1 if a check fails. docs/processes.md says how to set up Slurm.
"""

from __future__ import annotations

import contextlib
import operator
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from absl import flags

from lingvo_moe.cli import app
from lingvo_moe.distributed import watchdog
from lingvo_moe.errors import UserError
from lingvo_moe.testing import experiments
from lingvo_moe.training.checkpoint import Checkpoints
from lingvo_moe.utils import output_directories

_VALUES = flags.FlagValues()
flags.DEFINE_string("directory", "build/launchers", "where everything goes; new or empty", flag_values=_VALUES)
flags.DEFINE_list(
    "launchers",
    None,
    "which to check of srun, mpirun and flags; default: those that are installed",
    flag_values=_VALUES,
)

_TRAIN = (sys.executable, "-m", "lingvo_moe", "train")
_LAUNCH = {
    "srun": ("srun", "--ntasks=2", "--overcommit", "--kill-on-bad-exit=0"),
    "mpirun": ("mpirun", "-n", "2", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"),
    "flags": (sys.executable, "-m", "tools.launch_processes", "--processes=2", "--"),
}
# By launcher, where a process finds its number: in its environment, or on its command line.
_INDEX = {"srun": "SLURM_PROCID=1", "mpirun": "OMPI_COMM_WORLD_RANK=1", "flags": "--process=1"}
_STEPS, _MORE_STEPS, _UNTIL_SIGNAL = 24, 48, 10**6
_SECONDS, _POLL_SECONDS = 1800.0, 0.05


def main(arguments: list[str]) -> int:
    """Checks each launcher; returns 1 if one failed."""
    app.no_arguments(arguments[1:])
    output_directories.check_empty("--directory", _VALUES.directory)
    launchers = _launchers()
    directory = pathlib.Path(_VALUES.directory).absolute()
    with app.terminated_as_interrupted():
        problems = _check_all(launchers, experiments.make_data(directory / "data"), directory)
    print("\n".join(problems) or "every check passed")
    return 1 if problems else 0


def _launchers() -> list[str]:
    """Returns the launchers to check, those that are installed by default; names the others.

    Raises:
      UserError: --launchers has no item, or one that is unknown or not installed.
    """
    if _VALUES.launchers is None:
        for name in (name for name in _LAUNCH if not _is_installed(name)):
            print(f"{name:7} is not installed here, so it is not checked")
        return list(filter(_is_installed, _LAUNCH))  # `flags` is ours
    if not _VALUES.launchers:
        raise UserError(f"--launchers= is empty; expected some of {', '.join(_LAUNCH)}, or leave the flag out.")
    for name in app.chosen_names("--launchers", _VALUES.launchers, list(_LAUNCH), operator.eq):
        if not _is_installed(name):
            raise UserError(f"--launchers={name} is not installed here; install it, or leave it out.")
    return _VALUES.launchers


def _is_installed(launcher: str) -> bool:
    return shutil.which(_LAUNCH[launcher][0]) is not None


def _check_all(launchers: Sequence[str], data: experiments.Data, directory: pathlib.Path) -> list[str]:
    """Returns what went wrong under each launcher; `directory` is where everything goes."""
    alone = _Job("alone", data, directory)
    with alone.start(_MORE_STEPS) as running:
        if status := _wait(alone, running):
            raise UserError(f"training with one process, to compare with, ended with status {status}; see {alone.log}.")
    return [problem for name in launchers for problem in _check(_Job(name, data, directory), alone)]


class _Job:
    """Training of one log directory under one launcher."""

    def __init__(self, launcher: str, data: experiments.Data, directory: pathlib.Path):
        self.launcher, self.logdir, self.log = launcher, directory / launcher, directory / f"{launcher}.log"
        self._flags = [
            *experiments.settings("training.checkpoint_every=8", "training.evaluate_every=12"),
            f"--corpus={data.corpus}",
            f"--tokenizers={data.tokenizers}",
            f"--logdir={self.logdir}",
            "--platform=cpu",
        ]

    @contextlib.contextmanager
    def start(self, steps: int) -> Iterator[subprocess.Popen]:
        """Starts it, with its output added to `log`; yields the launcher. At the end of the context all are killed."""
        launch = [*_LAUNCH.get(self.launcher, ()), *(() if self.launcher == "flags" else _TRAIN)]
        command = [*launch, *self._flags, f"--steps={steps}"]
        with open(self.log, "ab") as log:
            # In a process group of its own, so that Ctrl-C reaches this program alone, which then ends the context.
            running = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0)
        try:
            yield running
        finally:
            # By their command line: a launcher's processes have groups of their own, or are children of Slurm's daemon.
            while pids := self.processes():
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(_POLL_SECONDS)
            running.wait()

    def processes(self) -> list[int]:
        """Returns the ids of the launcher and of the processes that it has started, as far as they have not ended."""
        return [pid for pid in _pids() if f"--logdir={self.logdir}".encode() in _read(pid, "cmdline").split(b"\0")]

    def losses(self) -> dict[int, set[float]]:
        """Returns the losses of each step, all that were reported."""
        return experiments.curves(self.logdir, "train")["cross_entropy"]

    def signal_process_1(self, number: int):
        """Sends a signal to the process that the launcher has started as number 1."""
        numbered = set(filter(self._is_process_1, self.processes()))
        found = next((pid for pid in numbered if _parent(pid) not in numbered), None)
        if found is None:
            raise UserError(f"{self.launcher}: there is no process with {_INDEX[self.launcher]}; see {self.log}.")
        os.kill(found, number)

    def _is_process_1(self, pid: int) -> bool:
        command, environment = (_read(pid, name).split(b"\0") for name in ("cmdline", "environ"))
        trains = b"train" in command and b"srun" not in command[0]
        return trains and _INDEX[self.launcher].encode() in {*command, *environment}


def _check(job: _Job, alone: _Job) -> list[str]:
    """Returns what went wrong under one launcher; prints a line for each check."""
    found: list[str] = []

    def check(what: str, passed: bool, seconds: float):
        print(f"{job.launcher:7} {what}: {'passed' if passed else 'FAILED'} ({seconds:.0f} s)", flush=True)
        found.extend([] if passed else [f"{job.launcher}: {what} (see {job.log})"])

    with job.start(_STEPS) as running:
        status, seconds = _timed(lambda: _wait(job, running))
    check("trains with the losses of one process", status == 0 and _same(job, alone, _STEPS), seconds)
    with job.start(_UNTIL_SIGNAL) as running:
        _await(job, _STEPS + 8, running)
        job.signal_process_1(signal.SIGKILL)
        status, seconds = _timed(lambda: _wait(job, running))
    lost = "process 1 of 2 is gone" in job.log.read_text(errors="replace") or job.launcher == "mpirun"
    check("ends when a process is killed", bool(status) and lost and seconds < watchdog.BOUND_SECONDS + 5, seconds)
    with job.start(_UNTIL_SIGNAL) as running:
        _await(job, max(Checkpoints(job.logdir).steps()) + 8, running)
        job.signal_process_1(signal.SIGTERM)
        _, seconds = _timed(lambda: _wait(job, running))
    stopped = re.findall(r"stopped after step (\d+), which is saved", job.log.read_text(errors="replace"))
    saved = bool(stopped) and int(stopped[-1]) == max(Checkpoints(job.logdir).steps())
    check("resumes, and stops with a checkpoint", saved and _same(job, alone, _MORE_STEPS), seconds)
    return found


def _same(job: _Job, alone: _Job, steps: int) -> bool:
    """Returns whether the losses of the first steps, as far as they were made, are those of one process."""
    ours, expected = job.losses(), alone.losses()
    return all(ours[step] == expected[step] for step in range(1, min(steps, max(ours)) + 1))


def _await(job: _Job, step: int, running: subprocess.Popen):
    deadline = time.monotonic() + _SECONDS
    while not any(saved >= step for saved in Checkpoints(job.logdir).steps()):
        if running.poll() is not None or time.monotonic() > deadline:
            raise UserError(f"{job.launcher}: training did not reach step {step}; see {job.log}.")
        time.sleep(_POLL_SECONDS)


def _wait(job: _Job, running: subprocess.Popen) -> int:
    """Returns the exit status of a launcher; raises UserError if it does not end."""
    try:
        return running.wait(_SECONDS)
    except subprocess.TimeoutExpired:
        raise UserError(f"{job.launcher}: training has not ended after {_SECONDS:g} s; see {job.log}.") from None


def _timed(call: Callable[[], int]) -> tuple[int, float]:
    start = time.monotonic()
    return call(), time.monotonic() - start


def _pids() -> list[int]:
    return [int(path.name) for path in pathlib.Path("/proc").iterdir() if path.name.isdecimal()]


def _parent(pid: int) -> int:
    found = re.search(rb"PPid:\s+(\d+)", _read(pid, "status"))
    return int(found[1]) if found else 0


def _read(pid: int, name: str) -> bytes:
    try:
        return pathlib.Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""  # the process has ended


if __name__ == "__main__":
    app.run(main, _VALUES)
