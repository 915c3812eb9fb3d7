"""Turns the abort of JAX's distributed runtime into one line and a status. This module imports no JAX.

When a process is lost, JAX aborts the others, with a page of log. `supervise` therefore runs the command in a child
process. The parent forwards signals to the child, and the child's standard error to its own, except for the runtime's
last messages, whose cause it reports in one line.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading

from lingvo_moe.distributed.membership import Membership
from lingvo_moe.utils import standard_error
from lingvo_moe.utils.exit_status import PROCESS_LOST

# A process that has sent no heartbeat for this long counts as lost.
HEARTBEAT_SECONDS = 20
# The others end at most this long after the loss of a process.
BOUND_SECONDS = HEARTBEAT_SECONDS + 10

_VARIABLE = "LINGVO_MOE_WATCHDOG"  # in the child: the parent's id and the file descriptor of its pipe
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG = 1  # of prctl(2)
_HEADER = re.compile(rb"[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ (?P<file>[\w.]+):\d+\]")
_RUNTIME_FILES = (
    b"client.h",
    b"coordination_service.cc",
    b"coordination_service_agent.cc",
    b"preemption_sync_manager.cc",
)
_ABORTED = "JAX distributed service detected fatal errors"
_LOST = (
    re.compile(r"stopped sending heartbeats\):\s+(\d+)"),
    re.compile(r"Task (\d+) heartbeat timeout"),
)
_COORDINATOR_LOST = ("Failed to send RPC to coordination service", "CoordinationService/Heartbeat")


def supervise(member: Membership):
    """Runs this command in a child process: returns there; in the parent, exits with the child's status.

    Python's standard error stays the same in the child, which may be a terminal. What C++ libraries write there passes
    through the parent.
    """
    link = os.environ.pop(_VARIABLE, None)
    if link is None:
        sys.exit(_run_child(member))
    parent, pipe = map(int, link.split(":"))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(PROCESS_LOST)
    sys.stderr.flush()
    sys.stderr = standard_error.lossy(os.dup(2))
    os.dup2(pipe, 2)
    os.close(pipe)


def is_child() -> bool:
    """Returns whether this process is a watched child that has not called `supervise` yet."""
    return _VARIABLE in os.environ


def _run_child(member: Membership) -> int:
    read, write = os.pipe()
    child = subprocess.Popen(
        [sys.executable, *sys.orig_argv[1:]],
        pass_fds=(write,),
        process_group=0,  # signals typed on the terminal reach it through the parent alone, once
        env={**os.environ, _VARIABLE: f"{os.getpid()}:{write}"},
    )
    for number in _FORWARDED:
        signal.signal(number, lambda number, frame: child.send_signal(number))
    log = _Log(read)
    log.start()
    status = child.wait()
    os.write(write, log.end)
    log.join()
    explained = explain(log.held.decode(errors="replace"), member)
    if explained is not None:
        line, status = explained
        print(f"\n{line}", file=sys.stderr, flush=True)
        return status
    sys.stderr.write(log.held.decode(errors="replace"))
    sys.stderr.flush()
    return _end_by_same_signal(-status) if status < 0 else status


def _end_by_same_signal(number: int) -> int:
    """Ends this process by the signal that has ended the child; returns a shell's status where that is impossible."""
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 128 + number


class _Log(threading.Thread):
    """Forwards the lines of a pipe to standard error, and holds back those of the distributed runtime.

    Attributes:
      held: the lines held back.
      end: what the parent writes to the pipe after the child's end. A process left behind by the child may hold the
        pipe open, so the end of the pipe is not the end of what the child wrote.
    """

    def __init__(self, pipe: int):
        super().__init__(name="log of the child", daemon=True)
        self.held = b""
        self.end = b"end of the log %s\n" % os.urandom(8).hex().encode()
        self._pipe = pipe

    def run(self):
        """Reads until `end`."""
        holds = aborts = False
        with open(self._pipe, "rb") as lines:
            for line in iter(lines.readline, b""):
                text, ended = line.removesuffix(self.end), line.endswith(self.end)
                header = _HEADER.match(text)
                # The abort ends the process. What follows is of handlers of its signal: libtpu's writes such lines.
                if header is not None and not aborts:
                    holds = header["file"] in _RUNTIME_FILES
                aborts |= holds and _ABORTED.encode() in text
                if holds:
                    self.held += text
                else:
                    # The child ends with its own status, also if nobody reads the log.
                    with contextlib.suppress(OSError):
                        os.write(2, text)
                if ended:
                    return


def explain(log: str, member: Membership) -> tuple[str, int] | None:
    """Returns a line about why the runtime has aborted a process, and the status to exit with.

    Args:
      log: the runtime's messages.
      member: the process.

    Returns:
      None where the log holds no abort.
    """
    if _ABORTED not in log:
        return None
    if "RegisterTask" in log:
        return f"error: {_start_problem(log, member)}", 2
    lost = next((f"process {found[1]}" for found in (pattern.search(log) for pattern in _LOST) if found), None)
    if lost is None:
        lost = "process 0" if any(words in log for words in _COORDINATOR_LOST) else "a process"
    line = f"{lost} of {member.count} is gone, so {member.name.partition(' of ')[0]} stops too"
    return f"{line}; the same command resumes from the newest checkpoint.", PROCESS_LOST


def _start_problem(log: str, member: Membership) -> str:
    if "ALREADY_EXISTS" in log:
        return f"two processes were started with --process={member.index}; start each of them once."
    if "INVALID_ARGUMENT" in log:
        return (
            f"{member.name} is none of those that process 0 waits for; start all processes with the same --processes."
        )
    where = f"--coordinator={member.coordinator}" if member.coordinator else "the address that JAX detected"
    return (
        f"not all {member.count} processes connected to the coordinator at {where} in time; start each of them once, "
        f"with the same --coordinator and --processes, where it can reach that address."
    )
