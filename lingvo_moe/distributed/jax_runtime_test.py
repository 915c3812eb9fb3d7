"""Two real processes agree, stop together, detect their launcher, and end together when one is lost."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from lingvo_moe.distributed import jax_runtime
from lingvo_moe.distributed.membership import Membership
from lingvo_moe.errors import UserError
from lingvo_moe.utils import free_ports
from lingvo_moe.utils.exit_status import PROCESS_LOST

# A test does not wait as long as a run on many machines does.
_HEARTBEAT_SECONDS, _START_SECONDS = 5, 60
_MEMBER = f"""
import os, pathlib, signal, sys, time
from lingvo_moe.cli import process_setup
process_setup.set_up_process()
from lingvo_moe.distributed import membership, watchdog
from lingvo_moe.errors import UserError
flags = [None if flag == "None" else flag for flag in sys.argv[1:4]]
member = membership.find(flags[0], *(flag and int(flag) for flag in flags[1:]), os.environ)
watchdog.supervise(member)
from lingvo_moe.distributed import jax_runtime
jax_runtime.HEARTBEAT_SECONDS = {_HEARTBEAT_SECONDS}
jax_runtime._LINGER_SECONDS = 2.0
def run(group, start_seconds):
    with jax_runtime.join(member, "cpu", start_seconds) as group:
        BODY
try:
    run(None, START)
except UserError as error:
    print("error:", error, file=sys.stderr, flush=True)
    os._exit(2)
"""
_READY = "group.barrier(); print('ready', flush=True)"


def _start(
    body: str, flags: list, start_seconds: int = _START_SECONDS, environment: dict[str, str] | None = None
) -> subprocess.Popen:
    """A process that calls `body` with its group; flags: the coordinator, the number of processes and its own."""
    return subprocess.Popen(
        [sys.executable, "-c", _MEMBER.replace("BODY", body).replace("START", str(start_seconds)), *map(str, flags)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **(environment or {})},
    )


def _two(body: str, start_seconds: int = _START_SECONDS) -> list[subprocess.Popen]:
    address = free_ports.address()
    return [_start(body, [address, 2, index], start_seconds) for index in (0, 1)]


def _end(started: list[subprocess.Popen]) -> list[tuple[int, str, str]]:
    """The status, the output without that of gloo, and the errors of each."""
    ended = [process.communicate(timeout=300) for process in started]
    outputs = ["".join(line for line in output.splitlines(True) if "Gloo" not in line) for output, _ in ended]
    return [(process.returncode, output, errors) for process, output, (_, errors) in zip(started, outputs, ended)]


@pytest.mark.slow
def test_processes_agree_and_stop_at_the_same_call(tmp_path):
    """Values and errors of one are those of all, however long; SIGTERM to one ends both, after the same step."""
    (tmp_path / "1").mkdir()
    body = f"""
        assert group.broadcast(lambda: [group.index, "x" * 5000]) == [0, "x" * 5000]
        assert group.gather(group.index * 10) == [0, 10]
        group.require_same({{"model": "tiny"}})
        group.require_shared(pathlib.Path({str(tmp_path)!r}))
        def refuse(call):
            try:
                call()
            except UserError as error:
                print(error)
        def fail():
            raise UserError("every checkpoint is corrupt")
        refuse(lambda: group.broadcast(fail))
        refuse(lambda: group.require_same({{"steps": str(group.index)}}))
        refuse(lambda: group.require_shared(pathlib.Path({str(tmp_path)!r}) / ("1" if group.index else "")))
        calls, stops = 0, False
        while not stops:
            calls, stops = calls + 1, group.any_stop_requested(False)
            if calls == 10 and group.index == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.02)
        assert group.any_stop_requested(False)
        print(calls)"""
    first, second = _end(_two(body.strip()))
    lines = first[1].splitlines()
    assert first[0] == second[0] == 0 and lines[-1] == second[1].splitlines()[-1], (first, second)
    assert lines[0] == "every checkpoint is corrupt"
    assert lines[1] == "process 1 has steps = 1, process 0 has 0; start all processes with the same flags and data."
    assert lines[2].startswith(f"--logdir={tmp_path}") and "process 1 does not see what process 0 writes" in lines[2]
    assert int(lines[3]) > 10
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        {
            "SLURM_JOB_ID": "7",
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_NTASKS": "2",
            "SLURM_PROCID": "{}",
            "SLURM_LOCALID": "{}",
        },
        {
            "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1:34911",
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_RANK": "{}",
            "OMPI_COMM_WORLD_LOCAL_RANK": "{}",
        },
    ],
    ids=["slurm", "open_mpi"],
)
def test_processes_find_each_other_as_a_launcher_tells_them(launcher):
    """`srun` and `mpirun` need no flags."""
    port = free_ports.address().partition(":")[2]
    started = [
        _start(
            "print(group.gather([group.index, group.count]))",
            [None, None, None],
            environment={name: value.format(index) for name, value in launcher.items()}
            | {"JAX_COORDINATOR_PORT": port},
        )
        for index in (0, 1)
    ]
    assert [(status, output) for status, output, _ in _end(started)] == [(0, "[[0, 2], [1, 2]]\n")] * 2


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_when_one_is_killed_the_other_ends_within_the_bound_with_one_line(victim):
    """Also where it waits for a collective, which gloo lets fail at once."""
    started = _two(f"{_READY}; [group.gather(number) for number in range(10**9)]")
    assert [process.stdout.readline() for process in started]
    time.sleep(1)
    started[victim].send_signal(signal.SIGKILL)
    start = time.monotonic()
    status, _, errors = _end(started)[1 - victim]
    assert status == PROCESS_LOST and time.monotonic() - start < _HEARTBEAT_SECONDS + 10, errors
    assert errors.strip() == (
        f"process {victim} of 2 is gone, so process {1 - victim} stops too; the same command resumes from the newest "
        f"checkpoint."
    )


@pytest.mark.slow
def test_an_error_of_one_ends_the_other_and_an_error_of_both_is_reported_by_both():
    """Neither hangs, and neither hides the error behind the end of the other."""
    fail = "(_ for _ in ()).throw(UserError('the disk is full'))"
    alone, other = _end(_two(f"{fail} if group.index == 1 else time.sleep(60)"))[::-1]
    assert (alone[0], alone[2]) == (2, "error: the disk is full\n")
    assert other[0] == PROCESS_LOST and "process 1 of 2 is gone" in other[2]
    assert [(status, errors) for status, _, errors in _end(_two(fail))] == [(2, "error: the disk is full\n")] * 2


@pytest.mark.slow
def test_who_does_not_come_or_comes_twice_is_an_error_in_bounded_time():
    address = free_ports.address()
    status, _, errors = _end([_start("pass", [address, 2, 0], start_seconds=3)])[0]
    assert status == 2 and errors.strip().startswith(
        f"error: not all 2 processes connected to the coordinator at --coordinator={address}"
    )
    started = [_start("pass", [address, 3, index], start_seconds=10) for index in (0, 1, 1)]
    ended = _end(started)
    assert all(status == 2 for status, _, _ in ended), ended
    assert sum("two processes were started with --process=1" in errors for _, _, errors in ended) == 1, ended


@pytest.mark.slow
def test_other_numbers_of_processes_are_refused():
    """Process 1 takes the run for one of three, process 0 for one of two."""
    address = free_ports.address()
    ended = _end(
        [
            _start("group.require_same({})", [address, 2, 0]),
            _start("group.require_same({})", [address, 3, 1]),
            _start("group.require_same({})", [address, 3, 2]),
        ]
    )
    assert [status for status, _, _ in ended] == [2, 2, 2], ended
    assert all("process 1 has --processes = 3, process 0 has 2" in errors for _, _, errors in ended[:2]), ended
    assert "process 2 of 3 is none of those that process 0 waits for" in ended[2][2], ended


def _raised_again() -> UserError:
    """What is raised where a checkpoint could not be written, and closing the checkpoints raises its error again."""
    written = OSError("no space left")
    try:
        try:
            raise UserError("the disk is full") from written
        finally:
            try:
                raise written
            except OSError as error:
                raise UserError("the disk is full") from error
    except UserError as error:
        return error


def test_an_error_in_a_cycle_of_causes_ends_the_process():
    """Process 0 looked for the cause of a full disk for ever, so that all processes hung without an error."""
    error = _raised_again()
    assert error.__cause__.__context__.__cause__ is error.__cause__, "a cycle"
    assert not jax_runtime._is_of_runtime(error)
    error.__cause__.__context__.__cause__ = jax_runtime.jax.errors.JaxRuntimeError("lost")
    assert jax_runtime._is_of_runtime(error)


def test_an_address_that_cannot_be_listened_at_is_refused_at_once():
    """JAX's service would crash without a word."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(UserError, match=r"process 0 cannot listen there \(Address already in use\); it must"),
            jax_runtime.join(Membership(2, 0, f"127.0.0.1:{port}")),
        ):
            pass
    with (
        pytest.raises(
            UserError,
            match=r"process 0 cannot listen there \(Cannot assign [a-z ]+\); it must be an address of this machine",
        ),
        jax_runtime.join(Membership(2, 0, "192.0.2.77:5000")),
    ):
        pass


def test_a_cluster_that_jax_does_not_know_is_an_error():
    """Several processes that train alone would write into the same directory."""
    with (
        pytest.raises(UserError, match="JAX detects no cluster that names the other processes"),
        jax_runtime.join(Membership(8)),
    ):
        pass
