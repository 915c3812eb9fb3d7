"""Processes agree, find out who does not belong to them, and end together; nobody waits for ever."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from lingvo_moe.distributed import process_group
from lingvo_moe.errors import UserError

_MEMBER = """
import sys, time
from lingvo_moe import processes
from lingvo_moe.errors import UserError
index, how = int(sys.argv[2]), sys.argv[3]
with processes.connect(sys.argv[1], 3, index) as run:
    run.meet()
    print("met", flush=True)
    if how == "fail slowly":
        send = run._send
        run._send = lambda *word: (send(*word), time.sleep(1))
    if how.startswith("fail"):
        raise UserError("the corpus is damaged")
    if how == "wait":
        time.sleep(60)
"""


def _address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def _together(count: int, act, coordinator: str | None = None, seconds: float = 20.0) -> list:
    """What `act` returns, or the UserError it raises, in each of `count` processes, which are threads here."""
    coordinator, found = coordinator or _address(), [None] * count

    def member(index: int):
        try:
            found[index] = act(process_group.connect(coordinator, count, index, seconds))
        except UserError as error:
            found[index] = error

    threads = [threading.Thread(target=member, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return found


def test_one_process_agrees_with_itself(tmp_path):
    alone = process_group.connect("127.0.0.1:1", 1, 0)
    assert alone.first and alone.broadcast(lambda: 7) == 7 and alone.gather(7) == [7]
    assert alone.any(True) and not alone.any(False)
    alone.require_same({"a": "1"})
    alone.require_shared(tmp_path)
    alone.finish()
    assert not list(tmp_path.iterdir())


def test_all_hear_the_first_one_and_it_hears_all(tmp_path):
    """Values, in order; a wish of any of them, at the same time everywhere; then they part without a word of complaint."""

    def act(run: process_group.ProcessGroup):
        with run:
            heard = [run.broadcast(lambda: [run.index, "said"]), run.gather(run.index * 10)]
            wishes = []
            while not any(wishes):
                wishes.append(run.any(run.index == 1))
            run.require_shared(tmp_path)
            run.require_same({"model": "tiny"})
            return heard, len(wishes)

    found = _together(3, act)
    assert [heard for heard, _ in found] == [[[0, "said"], [0, 10, 20]], [[0, "said"], [10]], [[0, "said"], [20]]]
    assert len({wishes for _, wishes in found}) == 1, "all stop at the same place"
    assert not list(tmp_path.iterdir())


def test_what_one_finds_wrong_is_an_error_of_all(tmp_path):
    """A decision that fails, other flags, a directory that is not shared: the same line everywhere."""

    def fail():
        raise UserError("no checkpoint is sound")

    def told(act):
        def member(run: process_group.ProcessGroup) -> str:
            with run:
                with pytest.raises(UserError) as error:
                    act(run)
                return str(error.value)

        return _together(2, member)

    elsewhere = tmp_path / "elsewhere"
    assert told(lambda run: run.broadcast(fail)) == ["no checkpoint is sound"] * 2
    assert (
        told(lambda run: run.require_same({"data": "x", "training.steps": str(run.index)}))
        == ["process 1 has training.steps = 1, process 0 has 0; start all processes with the same flags and data."] * 2
    )
    shared = told(lambda run: run.require_shared(tmp_path if run.first else elsewhere))
    assert shared[0].startswith(f"--logdir={tmp_path}: process 1 does not see what process 0 writes there")
    assert shared[0] == shared[1]


@pytest.mark.parametrize(
    ("coordinator", "count", "index", "said"),
    [
        ("nowhere", 2, 0, "--coordinator=nowhere: expected HOST:PORT"),
        ("10.0.0.1:", 2, 0, "expected HOST:PORT"),
        ("127.0.0.1:1234567", 2, 0, "expected HOST:PORT"),
        ("127.0.0.1:1", 2, 2, "--process=2 --processes=2: processes are numbered"),
        ("127.0.0.1:1", 0, 0, "--processes=0"),
        ("192.0.2.1:5000", 2, 0, "process 0 cannot listen there .*of this machine"),
    ],
)
def test_a_place_where_nobody_can_meet_is_refused_at_once(coordinator, count, index, said):
    with pytest.raises(UserError, match=said):
        process_group.connect(coordinator, count, index)


def test_who_does_not_come_is_named_in_bounded_time():
    """By the first process, and of the first process by another one."""
    address, start = _address(), time.monotonic()
    with pytest.raises(UserError, match=f"process 1, 2 has not come to --coordinator={address} in time; start it"):
        process_group.connect(address, 3, 0, seconds=0.2)
    with pytest.raises(
        UserError, match=f"--coordinator={address}: process 0 does not answer there .Connection refused"
    ):
        process_group.connect(address, 3, 1, seconds=0.2)
    assert time.monotonic() - start < 5


def test_another_number_of_processes_or_a_number_given_twice_is_told_to_all():
    for counts, indices, said in (
        ((2, 3), (0, 1), "process 1 was started with --processes=3, process 0 with 2"),
        ((3, 3, 3), (0, 1, 1), "two processes were started with --process=1"),
    ):
        address, found = _address(), []

        def member(count: int, index: int, address: str = address, found: list = found):
            with pytest.raises(UserError) as error:
                process_group.connect(address, count, index, 20)
            found.append(str(error.value))

        threads = [threading.Thread(target=member, args=arguments) for arguments in zip(counts, indices)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert sum(said in message for message in found) >= 2 and len(found) == len(counts), found


def test_strangers_are_not_answered():
    """Who connects and says something else, or nothing, neither joins nor stops a run."""
    address = _address()
    host, port = address.split(":")

    def act(run: process_group.ProcessGroup):
        with run:
            return run.count

    def disturb():
        for words in (b"", b"GET / HTTP/1.1\r\n\r\n", b"[1, 2]\n", b'{"process": 1}\n'):
            while True:
                try:
                    line = socket.create_connection((host, int(port)))
                    break
                except OSError:
                    time.sleep(0.01)
            with line:
                line.sendall(words)

    first = []
    listening = threading.Thread(target=lambda: first.append(act(process_group.connect(address, 2, 0, 20))))
    listening.start()
    disturb()
    assert act(process_group.connect(address, 2, 1, 20)) == 2
    listening.join(20)
    assert first == [2]


def _start(how: list[str]) -> list[subprocess.Popen]:
    address = _address()
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _MEMBER, address, str(index), what],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for index, what in enumerate(how)
    ]
    for process in started:
        assert process.stdout.readline() == "met\n"
    return started


@pytest.mark.parametrize("victim", [0, 1])
def test_where_one_is_killed_the_others_end_at_once_and_say_who_it_was(victim):
    """Also those that have no line to it; no traceback."""
    started, start = _start(["wait", "wait", "wait"]), time.monotonic()
    started[victim].send_signal(signal.SIGKILL)
    for index, process in enumerate(started):
        said = process.communicate(timeout=20)[1]
        if index != victim:
            assert process.returncode == process_group.EXIT_STATUS
            assert said.strip() == (
                f"process {victim} of 3 is gone, so process {index} stops too; the same command goes on from "
                f"the newest checkpoint."
            )
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("how", ["fail", "fail slowly"])
def test_an_error_of_one_ends_the_others_with_its_words(how):
    """And itself with its own status, though the others may be gone before it has told the error to all."""
    started = _start(["wait", how, "wait"])
    said = [process.communicate(timeout=20)[1] for process in started]
    assert [process.returncode for process in started] == [process_group.EXIT_STATUS, 1, process_group.EXIT_STATUS]
    for index in (0, 2):
        assert re.match(
            r"process 1 of 3 has ended with an error \(the corpus is damaged\), so process", said[index].strip()
        )


def test_who_is_done_may_go_first():
    """The end of a process that has finished is no accident."""
    started = _start(["done", "done", "done"])
    assert [(process.communicate(timeout=20)[1], process.returncode) for process in started] == [("", 0)] * 3
