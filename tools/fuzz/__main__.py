"""Throws malformed input at every front door, and checks that each is told of in one clear line and harms nothing.

    python -m tools.fuzz --cases=1000 --seed=0 [--only=CASE] [--processes=40] [--json=FILE]

A case is a call: of a command with a flag that holds something unfit, or of whatever reads a file, with that file damaged. It
must end with status 0, or with status 2 and one line `error: ...` that names the flag, the value or the file; within five
minutes, without a traceback; and every file that was there must be as it was, none left half written. Most cases run in this
process, one of `--processes` as a person would run it. Status 1 if a case failed; `--only` runs one again, with all that it says.
"""

from __future__ import annotations

import collections
import json
import os
import pathlib
import random
import shlex
import tempfile
import time
from collections.abc import Callable

from absl import flags

from lingvo_moe.cli import app
from lingvo_moe.engines.pjrt import Engine
from lingvo_moe.errors import UserError
from lingvo_moe.testing import experiments as tiny
from lingvo_moe.utils import progress
from tools.fuzz import case as judging
from tools.fuzz import file_targets, flag_targets, runner
from tools.fuzz import fixtures as inputs
from tools.fuzz.case import Case, Outcome
from tools.fuzz.fixtures import Fixtures

_VALUES = flags.FlagValues()
flags.DEFINE_integer("cases", 1000, "how many", lower_bound=1, flag_values=_VALUES)
flags.DEFINE_integer("seed", 0, "of the cases; the same seed and number are the same case", flag_values=_VALUES)
flags.DEFINE_integer("only", None, "run this case alone, and print what it says", lower_bound=0, flag_values=_VALUES)
flags.DEFINE_integer(
    "processes", 40, "one of so many cases runs in a process of its own; 0 for none", lower_bound=0, flag_values=_VALUES
)
flags.DEFINE_string("json", None, "also write the failures to this file", flag_values=_VALUES)

_DEVICES = 8
# Makers of cases and how often each is drawn.
OF_FLAGS: dict[Callable[[random.Random], Case], int] = {
    flag_targets.flag: 36,
    flag_targets.malformed: 6,
    flag_targets.command: 2,
    flag_targets.assignment: 14,
    flag_targets.imported: 4,
}
OF_FILES: dict[Callable[[Fixtures, random.Random], Case], int] = {
    file_targets.corpus: 10,
    file_targets.tokenizer: 6,
    file_targets.catalog: 14,
    file_targets.checkpoint: 14,
    file_targets.step_directory: 3,
    file_targets.safetensors: 6,
    file_targets.program: 5,
    file_targets.plan: 5,
    file_targets.package: 1,
    file_targets.sentences: 3,
}


def main(arguments: list[str]) -> int:
    """Runs the cases; returns 1 if one failed."""
    app.no_arguments(arguments[1:])
    if _VALUES.json and not pathlib.Path(_VALUES.json).absolute().parent.is_dir():
        raise UserError(f"--json={_VALUES.json}: there is no such directory; make it first.")
    only, start = _VALUES.only, time.monotonic()
    numbers = range(_VALUES.cases) if only is None else [only]
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        found = run(pathlib.Path(name), numbers, _VALUES.seed, _VALUES.processes, loud=only is not None)
    print(summary(found, time.monotonic() - start))
    failures = [result for result in found if result["problems"]]
    if _VALUES.json:
        pathlib.Path(_VALUES.json).write_text(json.dumps(failures, indent=1) + "\n", encoding="utf-8")
    return 1 if failures else 0


def run(
    directory: pathlib.Path, numbers: collections.abc.Sequence[int], seed: int, processes: int, loud: bool = False
) -> list[dict]:
    """Runs cases by their numbers; returns what came of each: `case`, `door`, `call`, `status`, `process`, `problems`."""
    # Where the command line would put programs that it lowers; a cache of the user's is not an input of a case.
    os.environ["XDG_CACHE_HOME"] = str(directory / "cache")
    (directory / "world").mkdir(parents=True)
    (directory / "cases").mkdir()
    # JAX starts once; a case that asks for fewer devices has the first of these.
    Engine(_DEVICES, "cpu")
    world, found = inputs.make(directory / "world"), []
    with progress.bar("fuzzing", len(numbers), "cases") as advance:
        for number in numbers:
            found.append(run_one(number, draw(world, seed, number), directory, processes, loud))
            if found[-1]["problems"]:
                print(_failure(found[-1], seed), flush=True)
            advance(note=f"{sum(bool(result['problems']) for result in found)} failed")
    return found


def draw(world: Fixtures, seed: int, number: int) -> Case:
    """The case of this number, which depends on it and the seed alone."""
    generator = random.Random(f"{seed} {number}")
    makers = {**OF_FLAGS, **OF_FILES}
    maker = generator.choices(list(makers), list(makers.values()))[0]
    return maker(generator) if maker in OF_FLAGS else maker(world, generator)


def run_one(number: int, case: Case, directory: pathlib.Path, processes: int, loud: bool) -> dict:
    """Runs a case in `directory/cases/NUMBER`, with the sound inputs in `directory/world`; see `run`."""
    place, world = directory / "cases" / str(number), directory / "world"
    place.mkdir()
    case.prepare(place)
    before = judging.snapshot(place, world)
    alone = bool(processes) and number % processes == 0 and runner.can_be_a_process(case)
    outcome = (runner.spawn if alone else runner.call)(case, place, world)
    problems = judging.judge(case, outcome, before, judging.snapshot(place, world))
    if loud:
        _show(case, outcome)
    # The two dozen flags that make a model tiny are the same in all calls; --only shows them.
    arguments = (shlex.quote(argument[:200]) for argument in case.arguments if argument not in tiny.settings())
    call = " ".join([case.entry, *arguments])
    return {
        "case": number,
        "door": case.entry_point,
        "call": _printable(call),
        "status": outcome.status,
        "process": alone,
        "problems": problems,
    }


def _show(case: Case, outcome: Outcome):
    print(
        _printable(
            f"{case.entry} {case.arguments}\nstatus {outcome.status}\nstdout: {outcome.stdout}\n"
            f"stderr: {outcome.stderr}{outcome.raised}"
        )
    )


def _failure(result: dict, seed: int) -> str:
    problems = "\n".join(f"  {problem}" for problem in result["problems"])
    return _printable(
        f"case {result['case']} FAILED, {result['door']}: {result['call']}\n{problems}\n  again: python -m "
        f"tools.fuzz --seed={seed} --only={result['case']}"
    )


def _printable(text: str) -> str:
    """A text that a terminal shows as it is: what controls it, or has no encoding, is spelt out."""
    return "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text)


def summary(found: list[dict], seconds: float) -> str:
    """A row for each front door."""
    row = "{:28} {:>6} {:>9} {:>9} {:>9} {:>7}".format
    entry_points: dict[str, list[dict]] = collections.defaultdict(list)
    for result in found:
        entry_points[result["door"]].append(result)
    lines = ["", row("front door", "cases", "status 0", "status 2", "processes", "failed"), "-" * 73]
    for name, results in [*sorted(entry_points.items()), ("together", found)]:
        statuses = collections.Counter(result["status"] for result in results)
        lines.append(
            row(
                name,
                len(results),
                statuses[judging.DONE],
                statuses[judging.MISTAKE],
                sum(result["process"] for result in results),
                sum(bool(result["problems"]) for result in results),
            )
        )
    return "\n".join([*lines, f"in {seconds / 60:.1f} minutes"])


if __name__ == "__main__":
    app.run(main, _VALUES)
