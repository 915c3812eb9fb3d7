"""Trains a tiny model while its process is killed again and again, and prints what was lost.

    python -m tools.soak --kills=100 --seed=0 [--processes=2] [--directory=build/soak] [--json=FILE]

A first training is undisturbed. The second is killed (or terminated, or its newest checkpoint corrupted) at moments
drawn from the seed, and started again. Its checkpoints must stay valid, few steps may be repeated, and in the end
losses and weights must equal those of the first bit for bit. The status is 1 if anything was lost. A kill takes about
twenty seconds, mostly the next start.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time

from absl import flags

from lingvo_moe.cli import app
from lingvo_moe.distributed.watchdog import BOUND_SECONDS
from lingvo_moe.utils import output_directories, output_files, progress
from lingvo_moe.utils.counts import counted
from tools.soak.faults import KILL
from tools.soak.run import MOST_REPEATED, Result, Soak, counts

_VALUES = flags.FlagValues()
flags.DEFINE_integer(
    "kills", 100, "number of SIGKILLs; one SIGTERM comes with about nine of them", lower_bound=1, flag_values=_VALUES
)
flags.DEFINE_integer(
    "processes",
    1,
    "processes that train together on the two devices; each kill hits one of them",
    lower_bound=1,
    upper_bound=2,
    flag_values=_VALUES,
)
flags.DEFINE_integer("seed", 0, "seed of moments and faults", flag_values=_VALUES)
flags.DEFINE_string("directory", "build/soak", "directory of all files; new or empty", flag_values=_VALUES)
flags.DEFINE_string("json", None, "also write what happened to this file", flag_values=_VALUES)


def main(arguments: list[str]) -> int:
    """Runs the soak; returns 1 if anything was lost."""
    app.no_arguments(arguments[1:])
    output_directories.check_empty("--directory", _VALUES.directory)
    directory = pathlib.Path(_VALUES.directory).absolute()
    output_files.check_path("--json", _VALUES.json)
    start = time.monotonic()
    soak = Soak(directory, _VALUES.kills, _VALUES.seed, _VALUES.processes)
    with progress.bar("soaking", _VALUES.kills, "kills") as advance:
        result = soak.run(lambda line: print(line, flush=True), advance)
    print(summary(result, time.monotonic() - start))
    if _VALUES.json:
        with output_files.atomic_writer(_VALUES.json) as file:
            file.write(json.dumps(dataclasses.asdict(result), indent=1) + "\n")
    return 1 if result.problems else 0


def summary(result: Result, seconds: float) -> str:
    """Returns a table of the faults, and what was lost."""
    row = "{:36} {:>6} {:>19} {:>9}".format
    lines = ["", row("phase of the process", "faults", "most steps repeated", "problems"), "-" * 73]
    lines += [row(*counted) for counted in counts(result)]
    kills = sum(event.fault.signal == KILL for event in result.events)
    corrupted = sum(event.corruption is not None for event in result.events)
    ends = [event.seconds for event in result.events if event.fault.signal == KILL]
    repeated = [event.repeated for event in result.events if event.corruption is None]
    lines += [
        "-" * 73,
        f"{kills} SIGKILL, {len(result.events) - kills} SIGTERM, {counted(corrupted, 'corruption')} of a checkpoint, "
        f"over {result.steps} steps, in {seconds / 60:.1f} minutes.",
        f"Steps repeated: {max(repeated, default=0)} at most ({MOST_REPEATED} are allowed), "
        f"{sum(repeated) / max(1, len(repeated)):.1f} on average. "
        f"Validation losses never computed: {result.unmeasured}.",
        f"From a kill to the end of all processes: {max(ends, default=0):.1f} s at most ({BOUND_SECONDS} are allowed).",
    ]
    lines += [f"LOST: {problem}" for problem in result.problems]
    passed = "Nothing was lost: every checkpoint valid, losses and weights bit for bit those of the undisturbed run."
    return "\n".join([*lines, "Something was lost." if result.problems else passed])


if __name__ == "__main__":
    app.run(main, _VALUES)
