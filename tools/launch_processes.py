"""Trains one model with several processes on this machine, which find each other over the loopback interface.

    python -m tools.launch_processes --processes=2 -- --model=m4.Small --devices=8 --logdir=log

The flags after `--` are those of `python -m lingvo_moe train`; --devices and --mesh count the devices of all processes
together. The output of process 0 is shown as it is; lines of the others begin with their number. SIGINT, SIGTERM and
SIGHUP are passed on: training stops after the step in progress, with a checkpoint. If a process is lost, the others end
by themselves; the same command resumes from the newest checkpoint. On several machines use srun, mpirun, or start a
process by hand on each; see docs/processes.md.

Exit status: that of the first process to end with another one than 0, as a shell counts it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from absl import flags

from lingvo_moe.cli import app
from lingvo_moe.distributed import watchdog
from lingvo_moe.errors import UserError
from lingvo_moe.utils import free_ports
from lingvo_moe.utils.exit_status import INTERRUPTED, PROCESS_LOST

_VALUES = flags.FlagValues()
flags.DEFINE_integer(
    "processes", 2, "the number of processes, with equally many devices each", lower_bound=1, flag_values=_VALUES
)

# After a process has failed the others have this long to end by themselves.
_PATIENCE_SECONDS = watchdog.BOUND_SECONDS + 10.0
# A process that was started under `nohup` ignores SIGHUP.
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_OWN_FLAGS = ("coordinator", "processes", "process")


def main(arguments: list[str]) -> int:
    """Runs the processes to their end; returns the exit status."""
    train_flags = arguments[1:]
    for flag in train_flags:
        if app.flag_name(flag) in _OWN_FLAGS:
            raise UserError(f"{flag} after --: the launcher passes that itself; --processes=N goes before --.")
    if not {"model", "logdir", "flagfile"}.intersection(map(app.flag_name, train_flags)):
        raise UserError("no --model among the flags of train; put them after --, for instance -- --model=m4.Small.")
    count = _VALUES.processes
    train = [sys.executable, "-m", "lingvo_moe", "train", *train_flags]
    rank = [f"--coordinator={free_ports.address()}", f"--processes={count}"]
    return run([[*train, *rank, f"--process={index}"] for index in range(count)])


def run(commands: Sequence[Sequence[str]]) -> int:
    """Runs one process for each command until all have ended; reports the first failure and returns the exit status."""
    processes = [_start(index, command) for index, command in enumerate(commands)]
    readers = [
        threading.Thread(target=_show, args=(index, process), daemon=True)
        for index, process in enumerate(processes)
        if index
    ]
    for reader in readers:
        reader.start()
    handlers = {number: signal.signal(number, _forward_to(processes)) for number in _FORWARDED}
    try:
        failed = _wait(processes)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for reader in readers:
        reader.join(5)
    return _report(failed, len(processes))


def _start(index: int, command: Sequence[str]) -> subprocess.Popen:
    # In a process group of its own: what is typed on the terminal reaches it through the launcher alone, once.
    return subprocess.Popen(
        command,
        process_group=0,
        stderr=subprocess.PIPE if index else None,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def _forward_to(processes: Sequence[subprocess.Popen]):
    def forward(number, frame):
        for process in processes:
            process.send_signal(number)

    return forward


def _wait(processes: Sequence[subprocess.Popen]) -> list[tuple[int, int]]:
    """Returns (index, status) of those that failed, in order; kills those that long after have not ended."""
    running, failed, deadline = dict(enumerate(processes)), [], float("inf")
    while running:
        ended = {index: process.returncode for index, process in running.items() if process.poll() is not None}
        running = {index: process for index, process in running.items() if index not in ended}
        failed += [(index, status) for index, status in ended.items() if status]
        if failed:
            deadline = min(deadline, time.monotonic() + _PATIENCE_SECONDS)
        if time.monotonic() > deadline:
            for process in running.values():
                process.kill()
        time.sleep(0.05)
    return failed


def _report(failed: list[tuple[int, int]], count: int) -> int:
    """Names the process that failed first, not those that ended because another one had; returns its status."""
    if not failed:
        return 0
    index, status = next((pair for pair in failed if pair[1] != PROCESS_LOST), failed[0])
    if status != INTERRUPTED:
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        print(f"process {index} of {count} {how}.", file=sys.stderr, flush=True)
    return 128 - status if status < 0 else status


def _show(index: int, process: subprocess.Popen):
    """Prints the lines of a process with its number in front."""
    assert process.stderr is not None
    with process.stderr as lines:
        for line in filter(bytes.strip, lines):
            sys.stderr.write(f"[{index}] {line.decode(errors='replace')}")
            sys.stderr.flush()


if __name__ == "__main__":
    app.run(main, _VALUES)
