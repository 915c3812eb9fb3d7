"""The run itself: a training that nothing happens to, one that is ended again and again, and what came of it."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import random
import re
import signal
import time
from collections.abc import Callable

from lingvo_moe.distributed.process_group import BOUND_SECONDS
from lingvo_moe.distributed.process_group import EXIT_STATUS as EXIT_STATUS_OF_OTHERS
from lingvo_moe.errors import UserError
from lingvo_moe.testing import experiments as tiny
from lingvo_moe.training.preemption import EXIT_STATUS
from tools.soak import checks, process, stacks
from tools.soak.faults import DAMAGES, KILL, Fault, draw
from tools.soak.process import Life

SAVE_EVERY, EVALUATE_EVERY, KEEP = 8, 12, 3
STEPS_PER_KILL = 30
_MARGIN = 2 * EVALUATE_EVERY
# A save is written while steps go on, and the next one waits for it: until then, two of them are at stake.
MOST_LOST = 2 * SAVE_EVERY
_RESUMING = re.compile(r"resuming from step (\d+)")


@dataclasses.dataclass
class Event:
    """One end of one process, and what it cost.

    Attributes:
      fault: what was done.
      place: where the process stood then.
      reached: the last step it had made.
      resumed: the step of the newest sound checkpoint afterwards.
      seconds: from the signal to the end of the process.
      damage: what was done to the newest checkpoint then; None for nothing.
      problems: what was lost.
    """

    fault: Fault
    place: stacks.Place
    reached: int
    resumed: int
    seconds: float
    damage: str | None = None
    problems: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Result:
    """What came of a run.

    Attributes:
      steps: of the training.
      events: in order.
      problems: what was lost, those of the events and of the end.
      unmeasured: held-out losses that no life came to measure, since it ended between the step's checkpoint and them.
    """

    steps: int
    events: list[Event] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)
    unmeasured: int = 0


class Soak:
    """Training under faults, in a directory of its own."""

    def __init__(self, directory: pathlib.Path, kills: int, seed: int, processes: int = 1):
        """Makes the data; `kills` SIGKILLs and some other faults are drawn from `seed`, each for one of the `processes`."""
        self._directory, self._kills, self._seed, self._process_group = directory, kills, seed, processes
        self._steps = STEPS_PER_KILL * (kills + 1)
        self._data = tiny.make_data(directory / "data")
        self._logdirs = {name: directory / name for name in ("reference", "soaked")}
        self._start_seconds = 0.0

    def run(self, tell: Callable[[str], None], advance: Callable[..., None]) -> Result:
        """Trains both ways.

        Args:
          tell: takes a line about each event.
          advance: is called after each kill.
        """
        result, generator = Result(self._steps), random.Random(self._seed)
        self._start_seconds = self._train_undisturbed("reference")
        tell(f"the reference is trained; {self._start_seconds:.0f} s before its first step")
        kills_left = self._kills
        for number, fault in enumerate(draw(self._kills, self._seed, 2 * STEPS_PER_KILL), start=1):
            event = self._live(number, fault, kills_left)
            if fault.damage is not None:
                self._damage(event, generator)
            result.events.append(event)
            result.problems += event.problems
            tell(_line(number, event))
            kills_left -= fault.signal == KILL
            advance(
                fault.signal == KILL, note=f"step {event.resumed} of {self._steps}, {len(result.problems)} problems"
            )
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
        """Trains to the end; returns how long it took to come to the first step."""
        with self._start(name, name) as life:
            life.await_step(1)
            start_seconds = time.monotonic() - life.started
            life.await_end(process.PATIENCE + self._steps)
        if any(life.statuses):
            raise UserError(f"training ended with status {life.statuses}: {life.said.strip().splitlines()[-1:]}")
        return start_seconds

    def _live(self, number: int, fault: Fault, kills_left: int) -> Event:
        """Starts a process, ends it, and judges what is left."""
        logdir = self._logdirs["soaked"]
        sound_before = checks.sound(logdir)
        first, damaged = max(sound_before, default=0), set(process.complete(logdir)) - set(sound_before)
        # So that every kill still finds steps to be made, and a save and an evaluation after them.
        ahead = max(1, min(fault.ahead, (self._steps - first - _MARGIN) // kills_left))
        with self._start("soaked", f"life-{number}") as life:
            if fault.aim != "start":
                life.await_step(first + 1)
                self._start_seconds = min(self._start_seconds, time.monotonic() - life.started)
            life.await_moment(fault, first + ahead, EVALUATE_EVERY, self._start_seconds)
            chosen = life.chosen(fault)
            place, complete = life.place(chosen), process.complete(logdir)
            seconds = life.end(fault.signal, chosen)
        sound = checks.sound(logdir)
        newest = max(sound, default=0)
        event = Event(fault, place, max(life.step, first), newest, seconds)
        event.problems += checks.missing_checkpoints(complete, sound, KEEP, damaged)
        event.problems += checks.missing_steps(
            event.reached, newest, MOST_LOST if fault.signal == KILL or life.died_telling else 0
        )
        event.problems += of_the_processes(life, fault, first, seconds)
        return event

    def _start(self, logdir: str, name: str) -> Life:
        return Life(self._arguments(logdir), self._logdirs[logdir], self._directory, name, self._process_group)

    def _damage(self, event: Event, generator: random.Random):
        """Damages the newest checkpoint, if it is sealed and another one is there to go on from."""
        logdir = self._logdirs["soaked"]
        steps, complete = checks.sound(logdir), process.complete(logdir)
        if len(steps) < 2 or steps[-1] not in complete:
            return
        damage, usable = DAMAGES[event.fault.damage]
        damage(logdir / "checkpoints" / str(steps[-1]), generator)
        event.damage, event.resumed = event.fault.damage, steps[-1] if usable else steps[-2]
        if (newest := max(checks.sound(logdir), default=0)) != event.resumed:
            event.problems.append(
                f"after the damage ({event.damage}) {newest} is the newest sound checkpoint instead of {event.resumed}"
            )

    def _compare(self, result: Result):
        """Holds the end of the run against the reference."""
        ours, theirs = self._logdirs["soaked"], self._logdirs["reference"]
        result.problems += checks.different_traces(tiny.curves(ours), tiny.curves(theirs))
        measured, all_measured = tiny.curves(ours, "valid"), tiny.curves(theirs, "valid")
        result.problems += checks.different_traces(measured, all_measured, whole=False)
        result.unmeasured = len(all_measured["cross_entropy"]) - len(measured["cross_entropy"])
        result.problems += checks.different_weights(ours, theirs, self._steps)


def of_the_processes(life: Life, fault: Fault, first: int, seconds: float) -> list[str]:
    """What the processes themselves did wrong: resumed elsewhere, or ended otherwise than they were asked to, or too late.

    Args:
      life: that has ended.
      fault: what ended it.
      first: the step it should have gone on from.
      seconds: from the fault to the end of all processes.
    """
    said, statuses, problems = life.said, life.statuses, []
    went_on = _RESUMING.search(said)
    if went_on and int(went_on[1]) != first:
        problems.append(f"went on from step {went_on[1]} instead of {first}")
    own, others = (-signal.SIGKILL, EXIT_STATUS_OF_OTHERS) if fault.signal == KILL else (EXIT_STATUS, EXIT_STATUS)
    if life.died_telling:
        own, others = -signal.SIGSEGV, EXIT_STATUS_OF_OTHERS
    expected = [own if index == life.chosen(fault) else others for index in range(len(statuses))]
    # Until it can answer, SIGTERM ends a process as SIGKILL does.
    asked_too_early = fault.signal != KILL and statuses[life.chosen(fault)] == -signal.SIGTERM and not life.step
    if statuses != expected and not asked_too_early:
        problems.append(f"ended with status {statuses} instead of {expected}: {said.strip().splitlines()[-1:]}")
    if fault.signal == KILL and seconds > BOUND_SECONDS:
        problems.append(f"another process ended {seconds:.1f} s after the kill, {BOUND_SECONDS} are allowed")
    return [*problems, *(["a traceback was printed"] if "Traceback" in said else [])]


def counts(result: Result) -> list[tuple[str, int, int, int]]:
    """Rows of (place, ends there, most steps lost, problems), most frequent first."""
    rows = collections.defaultdict(list)
    for event in result.events:
        rows[str(event.place)].append(event)
    found = [
        (
            name,
            len(events),
            max(max(0, event.reached - event.resumed) for event in events if event.damage is None)
            if any(event.damage is None for event in events)
            else 0,
            sum(len(event.problems) for event in events),
        )
        for name, events in rows.items()
    ]
    return sorted(found, key=lambda row: (-row[1], row[0]))


def _line(number: int, event: Event) -> str:
    """An event in a line of the log."""
    damage = f"; then {event.damage}" if event.damage else ""
    lost = (
        f"LOST: {'; '.join(event.problems)}"
        if event.problems
        else f"{max(0, event.reached - event.resumed)} steps to repeat"
    )
    return (
        f"{number:4} {event.fault.signal} aimed at {event.fault.aim}, hit {event.place}, at step {event.reached}{damage}; "
        f"goes on from {event.resumed}, {lost}"
    )
