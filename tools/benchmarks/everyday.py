"""Everyday waiting times on a workstation: commands from start to end, and the input pipeline against training.

    python -m tools.benchmarks.everyday [--corpus=build/quickstart/corpus]
        [--tokenizers=build/quickstart/tokenizers] [--rounds=3]

The time of a command is the CPU time of its process with a warm cache of programs, the least of all rounds; `train`
makes one step and saves it, `translate` translates one line. Writes the numbers to docs/performance.md. The status is 1
if one misses its goal.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from absl import flags

from lingvo_moe import experiment
from lingvo_moe.cli import app
from lingvo_moe.data.pipeline import TrainInput
from lingvo_moe.errors import UserError
from tools import markdown
from tools.benchmarks.worker import REPOSITORY

MODEL = "m4.Quickstart"
_STEPS = 61
_BATCHES = 100

_VALUES = flags.FlagValues()
flags.DEFINE_string("corpus", "build/quickstart/corpus", "corpus of the quickstart", flag_values=_VALUES)
flags.DEFINE_string("tokenizers", "build/quickstart/tokenizers", "tokenizers of the quickstart", flag_values=_VALUES)
flags.DEFINE_integer("rounds", 3, "number of runs of each command", lower_bound=1, flag_values=_VALUES)
flags.DEFINE_string("output", "docs/performance.md", "page that the numbers are written to", flag_values=_VALUES)


@dataclasses.dataclass(frozen=True)
class Row:
    """A measured number and its goal, in `unit`; the goal is a maximum, or a minimum if `at_least`."""

    what: str
    value: float
    goal: float
    unit: str
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether the number meets its goal."""
        return self.value >= self.goal if self.at_least else self.value <= self.goal


def main(arguments: list[str]) -> int:
    """Measures and writes the numbers; returns 1 if a goal is missed."""
    app.no_arguments(arguments[1:])
    markdown.check("--output", _VALUES.output, "everyday")  # reports a mistake before the measurements
    data = [f"--corpus={_VALUES.corpus}", f"--tokenizers={_VALUES.tokenizers}"]
    with tempfile.TemporaryDirectory(prefix="everyday.") as directory:
        rows = [
            *_commands(data, pathlib.Path(directory), _VALUES.rounds),
            *_pipeline(data, pathlib.Path(directory)),
        ]
    text = table(rows)
    print(text)
    markdown.replace(pathlib.Path(_VALUES.output), "everyday", text)
    return int(not all(row.met for row in rows))


def table(rows: Sequence[Row]) -> str:
    """Returns the rows as a Markdown table."""
    cells = []
    for row in rows:
        most = "at least" if row.at_least else "at most"
        cells.append((row.what, f"{row.value:.2f} {row.unit}", f"{most} {row.goal:g}", "yes" if row.met else "no"))
    return markdown.table(("what", "measured", "goal", "met"), cells)


def cpu_seconds(arguments: Sequence[str], status: int = 0, standard_input: str = "") -> float:
    """Returns the CPU seconds of the process `python -m lingvo_moe ARGUMENTS`; raises UserError for another status."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as read:
        read.write(standard_input)
        read.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-m", "lingvo_moe", *arguments],
            stdin=read,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )
        _, ended, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(ended)  # waited for above
        if process.returncode != status:
            output.seek(0)
            raise UserError(f"`{' '.join(arguments)}` ended with status {process.returncode}: {output.read()[-500:]}")
    return usage.ru_utime + usage.ru_stime


def _commands(data: list[str], directory: pathlib.Path, rounds: int) -> list[Row]:
    here = [f"--model={MODEL}", "--platform=cpu", "--devices=2", f"--cache={directory}/cache"]
    train = ["train", *here, *data, "--steps=1", "--set=training.evaluate_every=0"]
    translate = ["translate", *here, data[1], f"--logdir={directory}/first"]
    cpu_seconds([*train, f"--logdir={directory}/first"])  # fills the cache
    cpu_seconds(translate, standard_input="Hallo\n")
    measured = {
        ("`--help`", 1.0): lambda _: cpu_seconds(["--help"]),
        ("a mistyped model", 1.5): lambda _: cpu_seconds(["train", "--model=m4.Quikstart"], status=2),
        ("`list`", 5.0): lambda _: cpu_seconds(["list"]),
        (f"`train` of {MODEL}, one step", 12.0): lambda number: cpu_seconds([*train, f"--logdir={directory}/{number}"]),
        ("`translate`, one line", 8.0): lambda _: cpu_seconds(translate, standard_input="Hallo\n"),
    }
    return [
        Row(what, min(measure(number) for number in range(rounds)), goal, "CPU s")
        for (what, goal), measure in measured.items()
    ]


def _pipeline(data: list[str], directory: pathlib.Path) -> list[Row]:
    """Returns the speed of the input pipeline over that of training, and the share of padding in a batch."""
    config = experiment.get(MODEL).input
    batches = TrainInput(_VALUES.corpus, _VALUES.tokenizers, config).batches()
    next(batches)
    start = time.process_time()
    made = [batch for batch, _state in itertools.islice(batches, _BATCHES)]
    seconds = time.process_time() - start
    segments = [side["segment_ids"] for batch in made for side in batch.values()]
    tokens, positions = sum(int((ids > 0).sum()) for ids in segments), sum(ids.size for ids in segments)
    train = [
        "train",
        f"--model={MODEL}",
        *data,
        "--platform=cpu",
        "--devices=2",
        f"--cache={directory}/cache",
        "--set=training.evaluate_every=0",
        "--set=training.checkpoint_every=1000",
    ]
    one, many = (cpu_seconds([*train, f"--steps={steps}", f"--logdir={directory}/of_{steps}"]) for steps in (1, _STEPS))
    taken = tokens / _BATCHES * (_STEPS - 1) / (many - one)
    return [
        Row(
            "input pipeline alone over training, tokens per CPU second",
            tokens / seconds / taken,
            20.0,
            "times",
            at_least=True,
        ),
        Row("padding in a training batch, of all positions", 100 * (1 - tokens / positions), 10.0, "%"),
    ]


if __name__ == "__main__":
    app.run(main, _VALUES)
