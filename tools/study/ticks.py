"""The file that `cpu_clock` writes into a log directory: CPU time and target tokens after each step of a run."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Sequence

from lingvo_moe.utils import output_files

LIMIT = "STUDY_CPU_SECONDS"  # environment variable: training ends with a checkpoint after this time
PARENT = "STUDY_PARENT"  # environment variable: training ends with a checkpoint once its parent is another process
_FILE = "cpu_clock.jsonl"


@dataclasses.dataclass(frozen=True)
class Tick:
    """The state after a step.

    Attributes:
      step: its number.
      seconds: of CPU time since the first step.
      tokens: of the targets that were read, without padding.
      scalars: what was reported after this step, of the training curves that a study needs.
    """

    step: int
    seconds: float
    tokens: int
    scalars: dict[str, float] = dataclasses.field(default_factory=dict)

    def line(self) -> str:
        """Returns the tick as a line of the file."""
        return f"{json.dumps({**dataclasses.asdict(self), 'seconds': round(self.seconds, 4)})}\n"


def path(logdir: pathlib.Path) -> pathlib.Path:
    """Returns the file's path."""
    return logdir / _FILE


def read(logdir: pathlib.Path) -> list[Tick]:
    """Returns the ticks of a log directory, by increasing step; none where nothing was trained."""
    return list(_parse(path(logdir))) if path(logdir).exists() else []


def rewrite(logdir: pathlib.Path, ticks: Sequence[Tick]):
    """Replaces the file by one of these ticks, at once."""
    with output_files.atomic_writer(str(path(logdir))) as file:
        file.writelines(tick.line() for tick in ticks)


def _parse(file: pathlib.Path) -> Iterator[Tick]:
    for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):  # else the process was killed while it wrote
            yield Tick(**json.loads(line))
