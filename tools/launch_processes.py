"""Trains one model with several processes on this machine, which find each other over the loopback interface.

    python -m tools.launch_processes --processes=2 -- --model=m4.Small --devices=8 --logdir=log

What follows `--` are the flags of `python -m lingvo_moe train`; --devices and --mesh count the devices of all processes together.
What process 0 says is shown as it is, lines of others begin with their number. SIGINT and SIGTERM are handed on: training stops
after the step in progress, with a checkpoint. Where a process dies, the others end by themselves, at the latest after half a
minute by force; the same command goes on from the newest checkpoint. On several machines there is no launcher: run on machine I
of N, with a directory that all share as --logdir, and where machine 0 has the address 10.0.0.1,

    python -m lingvo_moe train --coordinator=10.0.0.1:2345 --processes=N --process=I --model=... --logdir=...

See docs/processes.md. Exit status: that of the process which ended first with another one than 0, as a shell counts it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from absl import flags

from lingvo_moe.cli import app
from lingvo_moe.distributed import process_group
from lingvo_moe.errors import UserError

_VALUES = flags.FlagValues()
flags.DEFINE_integer(
    "processes", 2, "how many; each has as many devices as another", lower_bound=1, flag_values=_VALUES
)

# What the others have to end by themselves: they notice at once where a process of this machine is gone.
_PATIENCE_SECONDS = process_group.BOUND_SECONDS + 10
# With what is sent to the processes; they know no SIGHUP, which would end them without a checkpoint.
_HANDED_ON = {signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM, signal.SIGHUP: signal.SIGTERM}
_OURS = ("coordinator", "processes", "process")


def main(arguments: list[str]) -> int:
    """Runs them to the end; returns the exit status."""
    train_flags = arguments[1:]
    for flag in train_flags:
        if flag.startswith("-") and flag.lstrip("-").partition("=")[0] in _OURS:
            raise UserError(f"{flag} after --: the launcher says that itself; --processes=N goes before --.")
    if not any(flag.startswith("--model") for flag in train_flags):
        raise UserError("no --model among the flags of train; put them after --, for instance -- --model=m4.Small.")
    return Launch(_VALUES.processes, train_flags).run()


class Launch:
    """Several processes of one run."""

    def __init__(self, count: int, train_flags: Sequence[str]):
        """Starts nothing yet; see the flags."""
        self._count, self._train_flags = count, train_flags
        self._running: dict[int, subprocess.Popen] = {}
        self._ended: list[tuple[int, int]] = []  # (process, its status), in order

    def run(self) -> int:
        """Starts them, waits until all have ended, says who failed first; returns the exit status."""
        port = _free_port()
        self._running = {index: self._start(index, port) for index in range(self._count)}
        readers = [
            threading.Thread(target=_show, args=(index, process), daemon=True)
            for index, process in self._running.items()
            if process.stderr is not None
        ]
        for reader in readers:
            reader.start()
        before = {number: signal.signal(number, self._hand_on) for number in _HANDED_ON}
        try:
            self._wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        for reader in readers:
            reader.join(5)
        return self._told()

    def _told(self) -> int:
        """Says who failed first, those aside that ended only because another one had; returns its status."""
        failed = [(index, status) for index, status in self._ended if status]
        first = next((pair for pair in failed if pair[1] != process_group.EXIT_STATUS), failed[0] if failed else None)
        if first is None:
            return 0
        if first[1] != app.INTERRUPTED:
            print(f"process {first[0]} of {self._count} {_described(first[1])}.", file=sys.stderr, flush=True)
        return 128 - first[1] if first[1] < 0 else first[1]

    def _start(self, index: int, port: int) -> subprocess.Popen:
        joining = [f"--coordinator=127.0.0.1:{port}", f"--processes={self._count}", f"--process={index}"]
        # A session of its own: what is typed on the terminal reaches the processes through us alone, once.
        return subprocess.Popen(
            [sys.executable, "-m", "lingvo_moe", "train", *self._train_flags, *joining],
            start_new_session=True,
            stderr=subprocess.PIPE if index else None,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def _hand_on(self, number, frame):
        for process in self._running.values():
            process.send_signal(_HANDED_ON[number])

    def _wait(self):
        """Until all have ended, those by force that have not long after one has failed."""
        deadline = None
        while self._running:
            for index, process in list(self._running.items()):
                if process.poll() is not None:
                    self._ended.append((index, process.returncode))
                    del self._running[index]
            if deadline is None and any(status for _, status in self._ended):
                deadline = time.monotonic() + _PATIENCE_SECONDS
            if deadline is not None and time.monotonic() > deadline:
                for process in self._running.values():
                    process.kill()
            time.sleep(0.05)


def _show(index: int, process: subprocess.Popen):
    with process.stderr as lines:
        for line in lines:
            if line.strip():
                sys.stderr.write(f"[{index}] {line.decode(errors='replace')}")
                sys.stderr.flush()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def _described(status: int) -> str:
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


if __name__ == "__main__":
    app.run(main, _VALUES)
