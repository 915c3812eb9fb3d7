"""The watchdog: signals and output pass through it, and an abort of the runtime becomes one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from lingvo_moe.distributed import watchdog
from lingvo_moe.distributed.membership import Membership
from lingvo_moe.utils.exit_status import PROCESS_LOST

_CHILD = """
import os, signal, sys, time
from lingvo_moe.distributed import watchdog
from lingvo_moe.distributed.membership import Membership
watchdog.supervise(Membership(2, 1, "127.0.0.1:1"))
"""
_FATAL = "F1122 09:08:20.068732   11448 client.h:80] Terminating: JAX distributed service detected fatal errors. "


def _start(code: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", _CHILD + code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def test_output_and_status_pass_through():
    """Python's own standard error stays a terminal if it was one, and C++ logs of other libraries are shown."""
    process = _start(
        "print('out'); print('python', file=sys.stderr); os.write(2, b'E1122 09:08:20.0 1 gpu.cc:1] no GPU\\n');"
        "sys.exit(7)"
    )
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (7, "out\n")
    assert sorted(errors.splitlines()) == ["E1122 09:08:20.0 1 gpu.cc:1] no GPU", "python"]


def test_a_log_that_nobody_reads_changes_no_status():
    """As after `train 2>&1 | head`: the child writes on, and ends with its own status."""
    code = "os.write(2, b'first\\n'); time.sleep(1); [os.write(2, b'more\\n' * 99) for _ in range(99)]; sys.exit(0)"
    with _start(code) as process:
        assert process.stderr.readline() == "first\n"
        process.stderr.close()
        assert process.wait(timeout=60) == 0


def test_an_abort_of_the_runtime_becomes_one_line_and_another_abort_is_shown():
    """A page of C++ stack does not help the user; a defect of another library must not be hidden."""
    lost = "os.write(2, b'W1122 09:08:20.0 1 preemption_sync_manager.cc:147] Failed to retrieve preemption notice\\n');"
    lost += f"os.write(2, b'''{_FATAL}UNAVAILABLE: Task 0 heartbeat timeout.\n*** stack trace: ***\n    @  0x7f\n''')"
    process = _start(f"{lost}; os.abort()")
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == PROCESS_LOST
    assert errors.strip() == (
        "process 0 of 2 is gone, so process 1 stops too; the same command resumes from the newest checkpoint."
    )
    process = _start("os.write(2, b'F1122 09:08:20.0 1 compiler.cc:3] Check failed\\n  @ 0x7f\\n'); os.abort()")
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == -signal.SIGABRT and "Check failed\n  @ 0x7f\n" in errors


def test_what_handlers_of_the_abort_write_is_not_shown():
    """libtpu, which is loaded where it is installed, reports each abort in lines that look like those of its log."""
    handler = "E1122 09:08:20.0 1 coredump_hook.cc:309] RAW: Remote crash data gathering hook invoked.\\n"
    lost = f"os.write(2, b'E1122 09:08:20.0 1 gpu.cc:1] no GPU\\n{_FATAL}Task 0 heartbeat timeout.\\n{handler}')"
    process = _start(f"{lost}; os.abort()")
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == PROCESS_LOST
    assert errors.splitlines() == [
        "E1122 09:08:20.0 1 gpu.cc:1] no GPU",
        "",
        "process 0 of 2 is gone, so process 1 stops too; the same command resumes from the newest checkpoint.",
    ]


def test_the_whole_log_is_read_however_long_and_a_process_left_behind_is_not_waited_for():
    """The reason comes last, and may come without a final line break; the child of a child holds the pipe open."""
    lines = "os.write(2, b'E1122 09:08:20.0 1 client.h:80] lost\\n' * 5000);"
    left = "import subprocess; left = subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL); print(left.pid);"
    fatal = f"os.write(2, b'{_FATAL}Task 0 heartbeat timeout'); sys.stdout.flush(); os.abort()"
    process = _start(left + lines + fatal)
    sleeping = int(process.stdout.readline())
    errors = process.communicate(timeout=60)[1]
    os.kill(sleeping, signal.SIGKILL)  # it was there all the time
    assert process.returncode == PROCESS_LOST and errors.strip().startswith("process 0 of 2 is gone"), errors


def test_signals_reach_the_child_and_it_dies_with_its_parent():
    """A scheduler signals, and kills, the process that it has started."""
    process = _start(
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(130)); print(os.getpid(), flush=True); time.sleep(60)"
    )
    with process:
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130
    process = _start("print('started', flush=True); time.sleep(600)")
    process.stdout.readline()
    process.kill()
    process.communicate(timeout=60)  # ends with the pipe, which the child holds open while it lives


@pytest.mark.parametrize(
    ("log", "line", "status"),
    [
        (
            "UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):\n1\nThe",
            "process 1 of 3 is gone",
            3,
        ),
        ("UNAVAILABLE: Failed to send RPC to coordination service.", "process 0 of 3 is gone", 3),
        ("DEADLINE\nRPC: /xla.coordination.CoordinationService/Heartbeat", "process 0 of 3 is gone", 3),
        ("INTERNAL: something new", "a process of 3 is gone, so process 2 stops too", 3),
        (
            "DEADLINE_EXCEEDED\nRPC: /RegisterTask",
            "error: not all 3 processes connected to the coordinator at --coordinator=h:1 in time",
            2,
        ),
        ("ALREADY_EXISTS\nRPC: /RegisterTask", "error: two processes were started with --process=2", 2),
        ("INVALID_ARGUMENT\nRPC: /RegisterTask", "error: process 2 of 3 is none of those", 2),
    ],
)
def test_causes_are_told_apart(log, line, status):
    found = watchdog.explain(_FATAL + log, Membership(3, 2, "h:1"))
    assert found is not None and found[0].startswith(line) and found[1] == status
    assert watchdog.explain(log, Membership(3, 2, "h:1")) is None
