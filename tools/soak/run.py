"""A soak run: an undisturbed reference training, one that is ended again and again, and their comparison."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import random
import re
import signal
import time
from collections.abc import Callable

from lingvo_moe.distributed.watchdog import BOUND_SECONDS
from lingvo_moe.errors import UserError
from lingvo_moe.testing import experiments as tiny
from lingvo_moe.utils.counts import counted
from lingvo_moe.utils.exit_status import INTERRUPTED, PROCESS_LOST
from tools.soak import checks, process, stacks
from tools.soak.faults import CORRUPTIONS, KILL, Fault, draw
from tools.soak.process import TrainingProcesses

SAVE_EVERY, EVALUATE_EVERY, KEEP = 8, 12, 3
STEPS_PER_KILL = 30
_MARGIN = 2 * EVALUATE_EVERY
# A checkpoint is written while steps continue, and the next one waits for it: until then, two
# intervals may have to be repeated.
MOST_REPEATED = 2 * SAVE_EVERY
_RESUMED = re.compile(r"resuming from step (\d+)")


@dataclasses.dataclass
class Event:
    """One fault and its consequences.

    Attributes:
      fault: the fault.
      phase: what the process was doing.
      reached: the last step it had made.
      resumed: the step of the newest valid checkpoint afterwards.
      seconds: from the signal to the end of all processes.
      corruption: what was done to the newest checkpoint afterwards, if anything.
      problems: what was lost.
    """

    fault: Fault
    phase: stacks.Phase
    reached: int
    resumed: int
    seconds: float
    corruption: str | None = None
    problems: list[str] = dataclasses.field(default_factory=list)

    @property
    def repeated(self) -> int:
        """The steps that were made again; a checkpoint may be newer than the last step that was reported."""
        return max(0, self.reached - self.resumed)


@dataclasses.dataclass
class Result:
    """The result of a soak run.

    Attributes:
      steps: number of steps of the training.
      events: the faults, in order.
      problems: what was lost, in the events and at the end.
      unmeasured: number of validation losses that were never computed, because a process ended between the checkpoint
        of their step and the evaluation.
    """

    steps: int
    events: list[Event] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)
    unmeasured: int = 0


class Soak:
    """Training under faults, in a directory of its own."""

    def __init__(self, directory: pathlib.Path, kills: int, seed: int, processes: int = 1):
        """Generates the data.

        Args:
          directory: a new or empty directory.
          kills: number of SIGKILLs; other faults come with them.
          seed: seed of the faults.
          processes: number of processes that train together; a fault hits one of them.
        """
        self._directory, self._kills, self._seed, self._num_processes = directory, kills, seed, processes
        self._steps = STEPS_PER_KILL * (kills + 1)
        self._data = tiny.make_data(directory / "data")
        self._logdirs = {name: directory / name for name in ("reference", "soaked")}
        self._start_seconds = 0.0
        self._valid: list[int] = []  # steps of the valid checkpoints; every array is read once after each fault

    def run(self, log: Callable[[str], None], advance: Callable[..., None]) -> Result:
        """Trains undisturbed and under faults, and compares.

        Args:
          log: called with a line about each event.
          advance: called after each fault, with the number of kills.
        """
        result, generator = Result(self._steps), random.Random(self._seed)
        self._start_seconds = self._train_undisturbed("reference")
        log(f"the reference is trained; {self._start_seconds:.0f} s before its first step")
        kills_left = self._kills
        for number, fault in enumerate(draw(self._kills, self._seed, 2 * STEPS_PER_KILL), start=1):
            event = self._run_until(number, fault, kills_left)
            if fault.corruption is not None:
                self._corrupt(event, fault.corruption, generator)
            result.events.append(event)
            result.problems += event.problems
            log(_line(number, event))
            kills_left -= fault.signal == KILL
            problems = counted(len(result.problems), "problem")
            advance(fault.signal == KILL, note=f"step {event.resumed} of {self._steps}, {problems}")
        self._train_undisturbed("soaked")
        self._compare(result)
        return result

    def _arguments(self, name: str) -> list[str]:
        changes = (
            f"training.checkpoint_every={SAVE_EVERY}",
            f"training.evaluate_every={EVALUATE_EVERY}",
            f"training.keep={KEEP}",
        )
        return [
            *tiny.settings(*changes),
            f"--corpus={self._data.corpus}",
            f"--tokenizers={self._data.tokenizers}",
            f"--logdir={self._logdirs[name]}",
            "--platform=cpu",
            f"--steps={self._steps}",
        ]

    def _train_undisturbed(self, name: str) -> float:
        """Trains to the end; returns the seconds until the first step."""
        with self._start(name, name) as training:
            training.await_step(1)
            start_seconds = time.monotonic() - training.started
            training.await_end(process.TIMEOUT_SECONDS + self._steps)
        if any(training.statuses):
            last = training.output.strip().splitlines()[-1:]
            raise UserError(f"training ended with status {training.statuses}: {last}")
        return start_seconds

    def _run_until(self, number: int, fault: Fault, kills_left: int) -> Event:
        """Starts the training, ends it by a fault, and checks what is left."""
        logdir = self._logdirs["soaked"]
        first, corrupt = max(self._valid, default=0), set(process.complete(logdir)) - set(self._valid)
        # Every later kill needs steps to be made, with a checkpoint and an evaluation.
        ahead = max(1, min(fault.ahead, (self._steps - first - _MARGIN) // kills_left))
        with self._start("soaked", f"start-{number}") as training:
            if fault.aim != "start":
                training.await_step(first + 1)
                self._start_seconds = min(self._start_seconds, time.monotonic() - training.started)
            training.await_moment(fault, first + ahead, EVALUATE_EVERY, self._start_seconds)
            chosen = training.chosen(fault)
            phase, complete = training.phase(chosen), process.complete(logdir)
            seconds = training.end(fault.signal, chosen)
        self._valid = checks.valid(logdir)
        newest = max(self._valid, default=0)
        event = Event(fault, phase, max(training.step, first), newest, seconds)
        event.problems += checks.missing_checkpoints(complete, self._valid, KEEP, corrupt)
        event.problems += checks.missing_steps(
            event.reached, newest, MOST_REPEATED if fault.signal == KILL or training.crashed_in_dump else 0
        )
        event.problems += check_processes(training, fault, first, seconds)
        return event

    def _start(self, logdir: str, name: str) -> TrainingProcesses:
        return TrainingProcesses(
            self._arguments(logdir), self._logdirs[logdir], self._directory, name, self._num_processes
        )

    def _corrupt(self, event: Event, name: str, generator: random.Random):
        """Corrupts the newest checkpoint if it is complete and there is another one to resume from."""
        logdir = self._logdirs["soaked"]
        steps, complete = self._valid, process.complete(logdir)
        if len(steps) < 2 or steps[-1] not in complete:
            return
        corrupt, usable = CORRUPTIONS[name]
        corrupt(logdir / "checkpoints" / str(steps[-1]), generator)
        event.corruption, event.resumed = name, steps[-1] if usable else steps[-2]
        self._valid = checks.valid(logdir)
        if (newest := max(self._valid, default=0)) != event.resumed:
            event.problems.append(
                f"after the corruption ({event.corruption}) {newest} is the newest valid checkpoint instead of "
                f"{event.resumed}"
            )

    def _compare(self, result: Result):
        """Compares the end of the run with the reference."""
        ours, theirs = self._logdirs["soaked"], self._logdirs["reference"]
        result.problems += checks.different_curves(tiny.curves(ours), tiny.curves(theirs))
        measured, all_measured = tiny.curves(ours, "valid"), tiny.curves(theirs, "valid")
        result.problems += checks.different_curves(measured, all_measured, complete=False)
        result.unmeasured = len(all_measured["cross_entropy"]) - len(measured["cross_entropy"])
        result.problems += checks.different_weights(ours, theirs, self._steps)


def check_processes(training: TrainingProcesses, fault: Fault, first: int, seconds: float) -> list[str]:
    """Returns the problems of the processes themselves: a wrong resumed step, a wrong exit status, a late end.

    Args:
      training: the processes, which have ended.
      fault: the fault that ended them.
      first: the step that they should have resumed from.
      seconds: from the fault to the end of all processes.
    """
    output, statuses, problems = training.output, training.statuses, []
    resumed = _RESUMED.search(output)
    if resumed and int(resumed[1]) != first:
        problems.append(f"resumed from step {resumed[1]} instead of {first}")
    own, others = (-signal.SIGKILL, PROCESS_LOST) if fault.signal == KILL else (INTERRUPTED, INTERRUPTED)
    if training.crashed_in_dump:
        own, others = -signal.SIGSEGV, PROCESS_LOST
    expected = [own if index == training.chosen(fault) else others for index in range(len(statuses))]
    # Before its handler is installed, SIGTERM ends a process as SIGKILL does.
    too_early = fault.signal != KILL and statuses[training.chosen(fault)] == -signal.SIGTERM and not training.step
    if statuses != expected and not too_early:
        problems.append(f"ended with status {statuses} instead of {expected}: {output.strip().splitlines()[-1:]}")
    if fault.signal == KILL and seconds > BOUND_SECONDS:
        problems.append(f"another process ended {seconds:.1f} s after the kill, {BOUND_SECONDS} are allowed")
    return [*problems, *(["a traceback was printed"] if "Traceback" in output else [])]


def counts(result: Result) -> list[tuple[str, int, int, int]]:
    """Returns rows of (phase, faults in it, most steps repeated, problems), most frequent first."""
    rows = collections.defaultdict(list)
    for event in result.events:
        rows[str(event.phase)].append(event)
    found = []
    for name, events in rows.items():
        repeated = [event.repeated for event in events if event.corruption is None]
        found.append((name, len(events), max(repeated, default=0), sum(len(event.problems) for event in events)))
    return sorted(found, key=lambda row: (-row[1], row[0]))


def _line(number: int, event: Event) -> str:
    """Returns the line of an event in the log."""
    corruption = f"; then {event.corruption}" if event.corruption else ""
    repeated = f"{counted(event.repeated, 'step')} repeated"
    return (
        f"{number:4} {event.fault.signal} aimed at {event.fault.aim}, hit {event.phase}, at step {event.reached}"
        f"{corruption}; resumes from {event.resumed}, "
        + (f"LOST: {'; '.join(event.problems)}" if event.problems else repeated)
    )
