"""Shows docs/collective_times.json, the results of tools.partitioning.collective_times, beside GShard figure 9."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from tools.report import files
from tools.report.tables import Column, Table

# What was measured, in the order of the table. An addition moves no data between devices: it is what AllReduce and
# AllToAll are compared with.
OPERATIONS = ("AllReduce", "AllToAll", "Add")
SIZES = (8, 32)  # MiB


@dataclasses.dataclass(frozen=True)
class Time:
    """The least time of one operation among virtual devices, over several runs.

    Attributes:
      operation: one of OPERATIONS.
      mebibytes: what each device has.
      processes: how many there were.
      devices: of all processes together.
      wall_seconds: from the first process's start of a run until the last one's end.
      cpu_seconds: of all processes together.
    """

    operation: str
    mebibytes: int
    processes: int
    devices: int
    wall_seconds: float
    cpu_seconds: float


@dataclasses.dataclass(frozen=True)
class Measured:
    """The results.

    Attributes:
      processor: the name of the processor.
      cores: of the machine.
      runs: of each operation, of which the least time counts.
      times: the results.
    """

    processor: str
    cores: int
    runs: int
    times: tuple[Time, ...]

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(processes, devices) of the times, in order."""
        return sorted({(time.processes, time.devices) for time in self.times})

    def time(self, operation: str, mebibytes: int, shape: tuple[int, int]) -> Time | None:
        """Returns a time; None if it was not measured."""
        for time in self.times:
            if (time.operation, time.mebibytes, time.processes, time.devices) == (operation, mebibytes, *shape):
                return time
        return None


def save(measured: Measured, path: pathlib.Path):
    """Writes the results."""
    files.save(dataclasses.asdict(measured), path)


def load(path: pathlib.Path) -> Measured:
    """Reads what `save` wrote; raises UserError as `files.load` does."""
    (measured,) = files.load("--collective_times", path, "tools.partitioning.collective_times", _made)
    return measured


def _made(content: Any) -> list[Measured]:
    times = tuple(Time(**time) for time in files.listed(content["times"]))
    for time in times:
        files.check_above_0(time, ("mebibytes", "processes", "devices", "wall_seconds", "cpu_seconds"))
        if time.operation not in OPERATIONS or time.mebibytes not in SIZES:
            raise ValueError(f"there is no {time.operation} of {time.mebibytes} MiB")
    if not times:
        raise ValueError("there are no times")
    return [Measured(**content | {"times": times})]


def table(measured: Measured) -> Table:
    """Wall time and CPU time of each operation, and the CPU time for each GiB that all devices have together."""
    columns = [Column("devices"), Column("processes")]
    for size in SIZES:
        columns += [Column(f"{name}, {size} MiB: wall, CPU ms") for name in OPERATIONS]
    columns += [Column(f"{name}, {SIZES[-1]} MiB: CPU s / GiB") for name in OPERATIONS]
    rows = []
    for processes, devices in measured.shapes:
        found = {(name, size): measured.time(name, size, (processes, devices)) for size in SIZES for name in OPERATIONS}
        cells = [_milliseconds(time) for time in found.values()]
        cells += [_per_gib(found[name, SIZES[-1]]) for name in OPERATIONS]
        rows.append([f"{devices}", f"{processes}", *cells])
    caption = (
        f"Measured: the least of {measured.runs} runs among virtual devices of {measured.cores} cores "
        f"({measured.processor})."
    )
    return Table(caption, columns, rows)


def growth(measured: Measured) -> tuple[int, int, dict[str, float]] | None:
    """Returns (fewest, most devices of one process, how many times the CPU time of the fewest each operation takes).

    Of the larger size; None if two numbers of devices of one process were not measured.
    """
    shapes = [shape for shape in measured.shapes if shape[0] == 1]
    if len(shapes) < 2:
        return None
    ends = {name: [measured.time(name, SIZES[-1], shapes[index]) for index in (0, -1)] for name in OPERATIONS}
    ratios = {name: last.cpu_seconds / first.cpu_seconds for name, (first, last) in ends.items() if first and last}
    return (shapes[0][1], shapes[-1][1], ratios) if len(ratios) == len(OPERATIONS) else None


def series(measured: Measured, operation: str, mebibytes: int, in_one_process: bool) -> Sequence[Time]:
    """Returns the times of an operation against the number of devices: of one process, or of one device in each."""
    shapes = [shape for shape in measured.shapes if (shape[0] == 1 if in_one_process else shape[0] == shape[1])]
    found = (measured.time(operation, mebibytes, shape) for shape in shapes)
    return [time for time in found if time is not None]


def _milliseconds(time: Time | None) -> str:
    return f"{1e3 * time.wall_seconds:.1f}, {1e3 * time.cpu_seconds:.1f}" if time else "–"


def _per_gib(time: Time | None) -> str:
    return f"{time.cpu_seconds / (time.devices * time.mebibytes / 1024):.2f}" if time else "–"
