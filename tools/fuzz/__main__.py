"""Calls every entry point with malformed input, and checks that each reports it in one clear line and changes no file.

    python -m tools.fuzz --cases=1000 --seed=0 [--only=CASE] [--processes=40] [--json=FILE]

A case is a call: of a command with an unfit value of a flag, or of a program that reads a file, with that file
corrupted. It must end with status 0, or with status 2 and one line `error: ...` that names the flag, the value or the
file; within five minutes, without a traceback; and every existing file must be unchanged, and no partial file be left.
Most cases run in this process, one of `--processes` as a user would run it. The status is 1 if a case failed; `--only`
runs one again, shows its output, and shrinks it if it fails. The same --seed and --cases draw the same cases.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import os
import pathlib
import shlex
import tempfile
import time
from collections.abc import Sequence

from absl import flags

from lingvo_moe.cli import app
from lingvo_moe.engines.pjrt import Engine
from lingvo_moe.errors import UserError
from lingvo_moe.testing import experiments as tiny
from lingvo_moe.utils import output_files, progress
from tools.fuzz import case as checks
from tools.fuzz import cases, fixtures, runner
from tools.fuzz.case import Case, Outcome

_VALUES = flags.FlagValues()
flags.DEFINE_integer("cases", 1000, "number of cases", lower_bound=1, flag_values=_VALUES)
flags.DEFINE_integer("seed", 0, "seed of the cases", flag_values=_VALUES)
flags.DEFINE_integer("only", None, "run this case alone, and show its output", lower_bound=0, flag_values=_VALUES)
flags.DEFINE_integer(
    "processes", 40, "run every N-th case in a process of its own; 0 for none", lower_bound=0, flag_values=_VALUES
)
flags.DEFINE_string("json", None, "also write the failures to this file", flag_values=_VALUES)

_DEVICES = 8
_LONGEST_ARGUMENT = 200


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of one case: its call as a shell would take it, and the problems of its outcome."""

    case: int
    target: str
    call: str
    status: int | None
    process: bool
    problems: list[str]


def main(arguments: list[str]) -> int:
    """Runs the cases; returns 1 if one failed."""
    app.no_arguments(arguments[1:])
    output_files.check_path("--json", _VALUES.json)
    only, start = _VALUES.only, time.monotonic()
    if only is not None and only >= _VALUES.cases:
        raise UserError(f"--only={only}: expected a number below --cases={_VALUES.cases}, which draws the case.")
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        fuzzer = Fuzzer(pathlib.Path(name), _VALUES.seed, _VALUES.cases, _VALUES.processes)
        results = fuzzer.run_all() if only is None else fuzzer.run_only(only)
    print(summary(results, time.monotonic() - start))
    failures = [dataclasses.asdict(result) for result in results if result.problems]
    if _VALUES.json:
        with output_files.atomic_writer(_VALUES.json) as file:
            file.write(json.dumps(failures, indent=1) + "\n")
    return 1 if failures else 0


class Fuzzer:
    """The cases of a seed, and the directories that they run in."""

    def __init__(self, directory: pathlib.Path, seed: int, count: int, processes: int = 0):
        """Makes the valid inputs and draws the cases.

        Args:
          directory: an empty directory.
          seed: seed of the cases.
          count: number of cases.
          processes: one of this many cases runs in a process of its own; 0 for none.
        """
        self._seed, self._count, self._processes = seed, count, processes
        # The cache of compiled programs; the user's own is not an input of a case.
        os.environ["LINGVO_MOE_CACHE"] = str(directory / "cache")
        self._fixtures, self._cases = directory / "fixtures", directory / "cases"
        self._fixtures.mkdir()
        self._cases.mkdir()
        self._numbers = itertools.count()
        # JAX starts once; a case that asks for fewer devices has the first of these.
        Engine(_DEVICES, "cpu")
        self._strategy = cases.strategy(fixtures.make(self._fixtures))

    def run_all(self) -> list[Result]:
        """Runs all cases; prints those that fail."""
        drawn, results = cases.draw(self._strategy, self._seed, self._count), []
        with progress.bar("fuzzing", len(drawn), "cases") as advance:
            for number, case in enumerate(drawn):
                alone = bool(self._processes) and number % self._processes == 0 and runner.can_be_a_process(case)
                results.append(self.run(number, case, alone)[0])
                if results[-1].problems:
                    print(self._failure(results[-1]), flush=True)
                advance(note=f"{sum(bool(result.problems) for result in results)} failed")
        return results

    def run_only(self, number: int) -> list[Result]:
        """Runs one case and shows its output; shrinks it if it fails."""
        case = cases.draw(self._strategy, self._seed, self._count)[number]
        result, outcome = self.run(number, case)
        print(_shown(case, outcome))
        if result.problems:
            print(self._failure(result), "\nshrinking it ...", flush=True)
            fails = lambda case: bool(self.run(number, case)[0].problems)  # noqa: E731
            simplest = cases.shrink(self._strategy, self._seed, self._count, number, fails)
            if simplest is not None:
                result, outcome = self.run(number, simplest)
                print(f"the simplest case that fails:\n{_shown(simplest, outcome)}\n{self._failure(result)}")
        return [result]

    def run(self, number: int, case: Case, alone: bool = False) -> tuple[Result, Outcome]:
        """Runs a case in a directory of its own; `alone` in a process of its own."""
        directory = self._cases / str(next(self._numbers))
        directory.mkdir()
        case.prepare(directory)
        before = checks.snapshot(directory, self._fixtures)
        outcome = (runner.spawn if alone else runner.call)(case, directory, self._fixtures)
        problems = checks.check(case, outcome, before, checks.snapshot(directory, self._fixtures))
        return Result(number, case.target, _call(case), outcome.status, alone, problems), outcome

    def _failure(self, result: Result) -> str:
        problems = "\n".join(f"  {problem}" for problem in result.problems)
        again = f"python -m tools.fuzz --seed={self._seed} --cases={self._count} --only={result.case}"
        failed = f"case {result.case} FAILED, {result.target}: {result.call}"
        return _printable(f"{failed}\n{problems}\n  to reproduce and shrink it: {again}")


def _call(case: Case) -> str:
    # The two dozen flags that make a model tiny are the same in all calls; --only shows them.
    arguments = (argument[:_LONGEST_ARGUMENT] for argument in case.arguments if argument not in tiny.settings())
    return _printable(" ".join([case.entry_point, *map(shlex.quote, arguments)]))


def _shown(case: Case, outcome: Outcome) -> str:
    return _printable(
        f"{case.entry_point} {case.arguments}\nstatus {outcome.status}\nstdout: {outcome.stdout}\n"
        f"stderr: {outcome.stderr}{outcome.raised}"
    )


def _printable(text: str) -> str:
    """Returns a text with control characters, and what has no encoding, escaped."""
    return "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text)


def summary(results: Sequence[Result], seconds: float) -> str:
    """Returns a table with a row for each target."""
    row = "{:28} {:>6} {:>9} {:>9} {:>9} {:>7}".format
    by_target: dict[str, list[Result]] = collections.defaultdict(list)
    for result in results:
        by_target[result.target].append(result)
    lines = ["", row("target", "cases", "status 0", "status 2", "processes", "failed"), "-" * 73]
    for name, members in [*sorted(by_target.items()), ("together", list(results))]:
        statuses = collections.Counter(result.status for result in members)
        processes, failed = sum(r.process for r in members), sum(bool(r.problems) for r in members)
        lines.append(row(name, len(members), statuses[checks.DONE], statuses[checks.MISTAKE], processes, failed))
    return "\n".join([*lines, f"in {seconds / 60:.1f} minutes"])


if __name__ == "__main__":
    app.run(main, _VALUES)
