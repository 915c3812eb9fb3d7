"""Measures our programs and the peers' in turn, in CPU time of one core, and writes docs/performance.md.

    python -m tools.benchmarks [--only=translation_8,decoding] [--rounds=8] [--json=FILE] [--venvs=DIRECTORY]

Each row is the ratio of our CPU seconds to another's for the same work: the least of all rounds on both sides, with
the quartiles of the ratios of single rounds. A peer runs in a virtual environment of its own with pinned versions, made
on first use; if that fails, its row stays empty. A row that fails otherwise is an error at the end. The sides are
checked to be comparable: equal tokens, layers, experts and capacity, losses that start near chance and fall. A run of
all rows also profiles the training step, and takes half an hour.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import pathlib

from absl import flags

from lingvo_moe.cli import app
from lingvo_moe.errors import UserError
from lingvo_moe.utils import output_files, processor, progress
from tools import markdown
from tools.benchmarks import comparisons, document
from tools.benchmarks.comparisons import COMPARISONS, Comparison, Directories, Result
from tools.benchmarks.environments import PeerMissingError

_VALUES = flags.FlagValues()
flags.DEFINE_list("only", [], "names of rows; default: all, which also writes the page", flag_values=_VALUES)
flags.DEFINE_integer("rounds", 8, "measurements of each side", lower_bound=2, flag_values=_VALUES)
flags.DEFINE_string("json", None, "also write the run to this file", flag_values=_VALUES)
flags.DEFINE_string(
    "directory", "build/benchmarks", "directory of the workers' logs and the cache of programs", flag_values=_VALUES
)
flags.DEFINE_string(
    "venvs", "build/benchmarks/venvs", "directory of the peers' virtual environments", flag_values=_VALUES
)
flags.DEFINE_string(
    "output", "docs/performance.md", "page that a run of all rows writes its numbers to", flag_values=_VALUES
)
_PROFILED = {"8 experts": "translation_8", "64 experts": "translation_64"}


def main(arguments: list[str]) -> int:
    """Runs the benchmarks; returns 1 if a row fails or misses its goal."""
    app.no_arguments(arguments[1:])
    chosen = _chosen(_VALUES.only)
    output_files.check_path("--json", _VALUES.json)
    page = pathlib.Path(_VALUES.output)
    if not _VALUES.only:
        # Reports a mistake before half an hour of measurements.
        markdown.check("--output", page, "measured", "profiled")
    directories = Directories(pathlib.Path(_VALUES.directory).absolute(), pathlib.Path(_VALUES.venvs).absolute())
    with progress.bar("measuring", len(chosen) * _VALUES.rounds, "rounds") as advance:
        results = [_measure(comparison, _VALUES.rounds, directories, advance) for comparison in chosen]
    only = [f"--only={','.join(_VALUES.only)}"] if _VALUES.only else []
    run = {
        "date": datetime.date.today().isoformat(),
        "machine": processor.name(),
        "flags": processor.vector_flags(),
        "rounds": _VALUES.rounds,
        "command": " ".join(["python -m tools.benchmarks", f"--rounds={_VALUES.rounds}", *only]),
        "results": [dataclasses.asdict(result) for result in results],
    }
    print(document.for_screen(results))
    _write(run)
    if not _VALUES.only:
        run["profiles"] = {title: _profile(name, directories) for title, name in _PROFILED.items()}
        _write(run)
        markdown.replace(page, "measured", document.for_page(run))
        markdown.replace(page, "profiled", document.by_part(run["profiles"]))
    return int(any(result.is_failure or (not result.missing and result.ratio > _goal(result)) for result in results))


def _write(run: dict):
    if _VALUES.json:
        with output_files.atomic_writer(_VALUES.json) as file:
            file.write(json.dumps(run, indent=1) + "\n")


def _chosen(only: list[str]) -> list[Comparison]:
    names = {comparison.name: comparison for comparison in COMPARISONS}
    unknown = [name for name in only if name not in names]
    if unknown:
        raise UserError(f"--only={unknown[0]}: there is no such row; the rows are {', '.join(names)}.")
    return [comparison for name, comparison in names.items() if not only or name in only]


def _measure(comparison: Comparison, rounds: int, directories: Directories, advance) -> Result:
    """Measures a row; if a peer's environment cannot be made, or the measurement fails, the row holds the reason."""
    try:
        return comparisons.run(comparison, rounds, directories, lambda: advance(note=comparison.name))
    except UserError as error:
        return Result(comparison.name, missing=str(error), is_failure=not isinstance(error, PeerMissingError))


def _profile(name: str, directories: Directories) -> dict[str, float]:
    comparison = next(comparison for comparison in COMPARISONS if comparison.name == name)
    with directories.worker(f"{name}.{comparisons.PROFILE}", comparisons.PROFILE, comparison.ours) as worker:
        return worker.facts["parts"]


def _goal(result: Result) -> float:
    return next(comparison.goal for comparison in COMPARISONS if comparison.name == result.name)


if __name__ == "__main__":
    app.run(main, _VALUES)
