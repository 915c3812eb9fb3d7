"""Measures our programs and the peers', one core, CPU time, taking turns, and writes what came out to docs/performance.md.

    python -m tools.benchmarks [--only=translation_8,decoding] [--rounds=8] [--json=FILE] [--venvs=build/benchmarks/venvs]

Each row is our CPU seconds over another's for the same work: the least of all rounds on both sides, with the quartiles of single
rounds' ratios. A peer runs in a virtual environment of its own with pinned versions, made on first use; one that cannot be made
leaves its row empty. What a ratio would mean nothing without is checked: equal tokens, layers, experts and capacity, losses that
begin near chance and fall. A whole run also profiles the training step, and takes half an hour.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import pathlib

from absl import flags

from lingvo_moe.cli import app
from lingvo_moe.errors import UserError
from lingvo_moe.utils import progress
from tools.benchmarks import comparisons, document
from tools.benchmarks.comparisons import COMPARISONS, Comparison, Place, Result

_VALUES = flags.FlagValues()
flags.DEFINE_list("only", [], "names of rows; default: all, and the page", flag_values=_VALUES)
flags.DEFINE_integer("rounds", 8, "measurements of each side", lower_bound=2, flag_values=_VALUES)
flags.DEFINE_string("json", None, "also write the run to this file", flag_values=_VALUES)
flags.DEFINE_string(
    "directory", "build/benchmarks", "for what workers say, and a cache of programs", flag_values=_VALUES
)
flags.DEFINE_string("venvs", "build/benchmarks/venvs", "for the peers' virtual environments", flag_values=_VALUES)
flags.DEFINE_string(
    "output", "docs/performance.md", "the page that a whole run writes its figures to", flag_values=_VALUES
)
_PROFILED = {"8 experts": "translation_8", "64 experts": "translation_64"}


def main(arguments: list[str]) -> int:
    """Runs it; returns 1 if a row that could be measured misses its goal."""
    app.no_arguments(arguments[1:])
    chosen = _chosen(_VALUES.only)
    place = Place(pathlib.Path(_VALUES.directory).absolute(), pathlib.Path(_VALUES.venvs).absolute())
    with progress.bar("measuring", len(chosen) * _VALUES.rounds, "rounds") as advance:
        results = [_measured(comparison, place, advance) for comparison in chosen]
    run = {
        "date": datetime.date.today().isoformat(),
        "machine": _processor(),
        "rounds": _VALUES.rounds,
        "command": f"python -m tools.benchmarks --rounds={_VALUES.rounds}",
        "results": [dataclasses.asdict(result) for result in results],
    }
    print(document.for_screen(results))
    if not _VALUES.only:
        run["profiles"] = {title: _profile(name, place) for title, name in _PROFILED.items()}
        document.put(pathlib.Path(_VALUES.output), "measured", document.for_page(run))
        document.put(pathlib.Path(_VALUES.output), "profiled", document.by_part(run["profiles"]))
    if _VALUES.json:
        pathlib.Path(_VALUES.json).write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
    return int(any(not result.missing and result.ratio > _goal(result) for result in results))


def _chosen(only: list[str]) -> list[Comparison]:
    names = {comparison.name: comparison for comparison in COMPARISONS}
    unknown = [name for name in only if name not in names]
    if unknown:
        raise UserError(f"--only={unknown[0]}: there is no such row; the rows are {', '.join(names)}.")
    return [comparison for name, comparison in names.items() if not only or name in only]


def _measured(comparison: Comparison, place: Place, advance) -> Result:
    """A row; what keeps a peer from being measured is told in it, and the others are measured all the same."""
    try:
        return comparisons.run(comparison, _VALUES.rounds, place, lambda: advance(note=comparison.name))
    except UserError as error:
        if comparison.by == comparisons.OURS:
            raise
        return Result(comparison.name, missing=str(error))


def _profile(name: str, place: Place) -> dict[str, float]:
    comparison = next(comparison for comparison in COMPARISONS if comparison.name == name)
    with place.worker(f"{name}.{comparisons.PROFILE}", comparisons.PROFILE, comparison.ours) as worker:
        return worker.facts["parts"]


def _goal(result: Result) -> float:
    return next(comparison.goal for comparison in COMPARISONS if comparison.name == result.name)


def _processor() -> str:
    for line in pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown processor"


if __name__ == "__main__":
    app.run(main, _VALUES)
