"""Measures AllReduce and AllToAll among virtual devices of this machine, as GShard figure 9 does on TPUs.

    python -m tools.partitioning.collective_times [--shapes=1x2,1x4,1x8,1x16,2x1,4x1] [--runs=20] [--output=FILE]

A shape is PROCESSESxDEVICES, the devices being those of each process. The partitioner inserts the collectives: a sum of
one part from each device, and a tensor whose sharding moves from one dimension to another. An addition, which sends
nothing, is measured beside them. Times are the least of all runs, wall time and CPU time of all processes. Virtual
devices share the cores and the memory of one machine; tools.report shows what that means for the times.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from absl import flags

from lingvo_moe import lazy
from lingvo_moe.cli import app
from lingvo_moe.distributed import watchdog
from lingvo_moe.distributed.membership import Membership
from lingvo_moe.distributed.process_group import ProcessGroup
from lingvo_moe.errors import UserError
from lingvo_moe.lazy import tf
from lingvo_moe.program import Program, lower
from lingvo_moe.sharding.layout import DeviceMesh, Layout, Spec
from lingvo_moe.utils import free_ports, output_files, processor, progress
from tools import launch_processes
from tools.report import measured
from tools.report.measured import Measured, Time

_VALUES = flags.FlagValues()
flags.DEFINE_list(
    "shapes",
    ["1x2", "1x4", "1x8", "1x16", "2x1", "4x1"],
    "what to measure, each PROCESSESxDEVICES, with that many virtual devices in each process",
    flag_values=_VALUES,
)
flags.DEFINE_integer("runs", 20, "runs of each operation, of which the least time counts", 1, flag_values=_VALUES)
flags.DEFINE_string(
    "output",
    None,
    "the file of results; by default docs/collective_times.json, with the other flags' defaults alone",
    flag_values=_VALUES,
)
# The statuses of a process that was asked to end.
_INTERRUPTED = (app.INTERRUPTED, 128 + signal.SIGTERM, 128 + signal.SIGHUP)
_PUBLISHED = "docs/collective_times.json"
_SHAPE = re.compile(r"([1-9]\d{0,3})x([1-9]\d{0,3})")
_FLOAT32 = 4
# Memory stays with the process, so that a run takes no page faults: with glibc's defaults a result of 32 MiB is new
# memory in each run, and an addition takes 30 times as long as of 8 MiB.
_KEEP_MEMORY = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=100000000000:glibc.malloc.arena_max=1"
# By operation, the logical axes of what it returns; the first dimension of what it reads is sharded.
_RETURNED = {"AllReduce": "m", "AllToAll": "gEm", "Add": "Gem"}


@dataclasses.dataclass(frozen=True)
class Task:
    """What one process does: its place among the processes, and what it measures.

    Attributes:
      processes, process: the number of processes, and which one this is.
      devices: of all processes.
      runs: of each operation.
      coordinator: where process 0 listens.
      output: the file to which process 0 writes its times.
    """

    processes: int
    process: int
    devices: int
    runs: int
    coordinator: str
    output: str


def program(operation: str, devices: int, size: int) -> Program:
    """Returns the program `{x} -> {y}` of one operation.

    Args:
      operation: one of `measured.OPERATIONS`.
      devices: how many.
      size: bytes that each device has, a multiple of four times the number of devices.

    `x` is float32[devices, devices, n], sharded along the first dimension. AllReduce adds up what all devices have,
    AllToAll shards the second dimension, and Add adds a number.
    """
    layout = Layout.of(DeviceMesh((devices,)))
    shape = (devices, devices, size // devices // _FLOAT32)

    def function(inputs: dict) -> dict:
        x = layout.annotate(inputs["x"], "Gem")
        if operation == "AllReduce":
            y = tf.reduce_sum(tf.reshape(x, (devices, -1)), axis=0)
        else:
            y = x + 1.0 if operation == "Add" else x
        return {"y": layout.annotate(y, _RETURNED[operation])}

    return lower(operation, function, {"x": Spec(shape, "float32", "Gem")}, {"y": _RETURNED[operation]}, layout)


def filled(devices: int, size: int) -> Program:
    """Returns the program `{seed} -> {x}` that makes the input of `program`: what a device has is its number."""
    layout = Layout.of(DeviceMesh((devices,)))

    def function(inputs: dict) -> dict:
        numbers = tf.reshape(tf.range(float(devices)) + inputs["seed"], (devices, 1, 1))
        x = tf.broadcast_to(numbers, (devices, devices, size // devices // _FLOAT32))
        return {"x": layout.annotate(x, "Gem")}

    return lower("filled", function, {"seed": Spec((), "float32", "")}, {"x": "Gem"}, layout)


def main(arguments: list[str]):
    """Measures each shape with processes of its own and writes the file; or does the task of one of these processes."""
    if len(arguments) == 2 and (task := _task(arguments[1])):
        _do(task)
        return
    app.no_arguments(arguments[1:])
    shapes = [_shape(text) for text in _VALUES.shapes]
    if not shapes:
        raise UserError("--shapes= is empty: expected PROCESSESxDEVICES, for instance 1x8; several with commas.")
    output = _output()
    output_files.check_path("--output", output)
    os.environ["GLIBC_TUNABLES"] = _KEEP_MEMORY  # of the processes
    with app.terminated_as_interrupted():
        times = [time for shape in progress.track(shapes, "measuring") for time in measure(*shape, _VALUES.runs)]
    cores = len(os.sched_getaffinity(0))
    measured.save(Measured(processor.name(), cores, _VALUES.runs, tuple(times)), pathlib.Path(output))


def _output() -> str:
    """Returns the file of results; raises UserError for a trial that would replace the published ones."""
    if _VALUES.output is not None:
        return _VALUES.output
    if any(_VALUES[flag].value != _VALUES[flag].default for flag in ("shapes", "runs")):
        raise UserError(f"--output is missing: {_PUBLISHED} has the default --shapes and --runs; name another file.")
    return _PUBLISHED


def measure(processes: int, devices: int, runs: int) -> list[Time]:
    """Returns the times among `devices` virtual devices, divided among processes that it starts.

    Raises:
      UserError: a process failed.
      KeyboardInterrupt: they were asked to end.
    """
    with tempfile.TemporaryDirectory() as directory:
        output, address = pathlib.Path(directory, "times.json"), free_ports.address()
        tasks = [Task(processes, index, devices, runs, address, str(output)) for index in range(processes)]
        command = [sys.executable, "-m", "tools.partitioning.collective_times"]
        status = launch_processes.run([[*command, json.dumps(dataclasses.asdict(task))] for task in tasks])
        if status in _INTERRUPTED:
            raise KeyboardInterrupt
        if status:
            raise UserError(
                f"--shapes={processes}x{devices // processes}: the processes ended with status {status}, see above; "
                f"leave the shape out, or free memory: {devices} devices take {devices * measured.SIZES[-1] * 3} MiB."
            )
        return [Time(**values) for values in json.loads(output.read_text(encoding="utf-8"))]


def _task(text: str) -> Task | None:
    """Returns the task that an argument is, None for an argument of a user."""
    try:
        return Task(**json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return None


def _do(task: Task):
    with _joined(task) as group:
        # Not earlier: JAX must not look for devices before the processes are connected.
        from lingvo_moe.engines import pjrt

        engine = pjrt.Engine(task.devices, platform="cpu", processes=task.processes)
        found = [
            Time(name, size, task.processes, task.devices, *_least(group, engine, name, size * 2**20, task.runs))
            for size in measured.SIZES
            for name in measured.OPERATIONS
        ]
        if group.is_primary:
            text = json.dumps([dataclasses.asdict(time) for time in found])
            pathlib.Path(task.output).write_text(text, encoding="utf-8")


def _least(group: ProcessGroup, engine: Any, operation: str, size: int, runs: int) -> tuple[float, float]:
    """Returns the least wall time and the least CPU time of one run, in seconds; one run before them does not count."""
    x = engine.compile(filled(len(engine.devices), size))({"seed": np.float32(0)})["x"]
    executable = engine.compile(program(operation, len(engine.devices), size))
    measurements = []
    for _ in range(runs + 1):
        group.barrier()
        start, cpu = time.monotonic(), time.process_time()
        executable({"x": x})["y"].block_until_ready()
        measurements.append((start, time.monotonic(), time.process_time() - cpu))
    # The processes are on one machine, whose monotonic clock they share.
    of_run = list(zip(*group.gather(measurements)))[1:]
    wall = min(max(end for _, end, _ in run) - min(start for start, _, _ in run) for run in of_run)
    return wall, min(sum(cpu for _, _, cpu in run) for run in of_run)


@contextlib.contextmanager
def _joined(task: Task) -> Iterator[ProcessGroup]:
    """Connects the processes, if there are several."""
    if task.processes == 1:
        yield ProcessGroup()
        return
    member = Membership(task.processes, task.process, task.coordinator)
    watchdog.supervise(member)
    # Not later: the runtime writes why it ends this process to file descriptor 2, which the import redirects.
    lazy.import_tensorflow()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # gloo reports each connection there
    from lingvo_moe.distributed import jax_runtime

    with jax_runtime.join(member, "cpu") as group:
        yield group


def _shape(text: str) -> tuple[int, int]:
    """Returns (processes, devices of all processes)."""
    matched = _SHAPE.fullmatch(text)
    if not matched or int(matched[1]) * int(matched[2]) not in (2**exponent for exponent in range(1, 8)):
        raise UserError(
            f"--shapes={text}: expected PROCESSESxDEVICES, together a power of two from 2 to 128, for instance 1x8 for "
            f"one process with eight devices."
        )
    return int(matched[1]), int(matched[1]) * int(matched[2])


if __name__ == "__main__":
    app.run(main, _VALUES)
