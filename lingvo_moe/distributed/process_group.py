"""Many processes that train as one: a line from the first to each other, on which they agree and notice who is gone.

JAX moves tensors between the processes; here passes what their Python must agree on: when to stop, which checkpoint is sound,
where the data is. The kernel closes the line of a process that ends, whatever ended it, so the others know within milliseconds; a
machine that does not answer any more counts as gone after `BOUND_SECONDS`. Whoever notices ends too, at once and with one line:
nothing can be trained without the missing part, and what was saved is complete.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import queue
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from lingvo_moe.errors import UserError

# Of a process that ends because another one did.
EXIT_STATUS = 3
# Silence, then probes that nobody answers: what it takes the kernel to give a machine up.
_IDLE_SECONDS, _PROBE_SECONDS, _PROBES = 8, 4, 3
BOUND_SECONDS = _IDLE_SECONDS + _PROBE_SECONDS * _PROBES
# How long processes wait for each other at the start.
START_SECONDS = 300.0
# A process that fails waits so long for word that another one is gone, which would be why.
_WORD_SECONDS = 2.0
_HELLO_BYTES = 1000


class ProcessGroup:
    """The processes of a run, of which this is one; values that they exchange are JSON. This class is a run of one.

    All processes call `decide` and the methods that follow it in the same order. As a context it ends
    well where `finish` was called; otherwise it tells the others that this process failed.

    Attributes:
      index: of this process.
      count: how many there are.
      finished: whether all have done what there was to do.
    """

    index, count, finished = 0, 1, False

    @property
    def is_primary(self) -> bool:
        """Whether this is the process that speaks for all."""
        return self.index == 0

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, kind, error, traceback):
        pass

    def broadcast(self, function: Callable[[], Any]) -> Any:
        """Calls `function` in the first process; returns its value, or raises its UserError, in all."""
        return function()

    def gather(self, value: Any) -> list:
        """Returns every process's value, by index, in the first process, and in another one `[value]`."""
        return [value]

    def any(self, wish: bool) -> bool:
        """Whether one of the processes wishes it, the same answer in all: a wish that comes late counts the next time."""
        return wish

    def barrier(self):
        """Waits until all processes have come here."""
        self.gather(None)
        self.broadcast(lambda: None)

    def finish(self):
        """Meets, for the last time: from now on one may end without another minding."""
        if not self.finished:
            self.barrier()
            self.finished = True

    def require_same(self, settings: dict[str, str]):
        """Raises UserError, in all, where a process has other settings than the first."""
        everyone = self.gather(settings)
        self.broadcast(lambda: _check_same(everyone))

    def require_shared(self, directory: pathlib.Path):
        """Raises UserError, in all, where a process does not see what the first writes into `directory`."""
        with contextlib.ExitStack() as written:
            name = self.broadcast(
                lambda: (
                    pathlib.Path(
                        written.enter_context(tempfile.NamedTemporaryFile(dir=directory, prefix="shared.")).name
                    ).name
                )
            )
            everyone = self.gather((directory / name).exists())
            self.broadcast(lambda: _check_shared(directory, everyone))


class MultiProcessGroup(ProcessGroup):
    """A run of several processes: the first one's lines to all others, another one's to the first.

    Attributes:
      host: of the first process, as this one was told.
      own_host: the address of this one, on its way to the first.
    """

    def __init__(self, index: int, count: int, host: str, lines: dict[int, socket.socket]):
        self.index, self.count, self.host, self._lines = index, count, host, lines
        self.own_host = next(iter(lines.values())).getsockname()[0]
        self._inbox: dict[int, queue.SimpleQueue] = {peer: queue.SimpleQueue() for peer in lines}
        self._wished = self._leaving = self._parting = False
        self._ended: set[int] = set()
        self._parted = threading.Event()  # our last word is said
        self._telling = threading.Lock()
        self._standard_error = os.dup(2)  # which may be turned aside for a while, see `lazy`
        for peer in lines:
            threading.Thread(target=self._listen, args=(peer,), name=f"process {peer}", daemon=True).start()

    def __exit__(self, kind, error, traceback):
        if kind is None:
            self.finish()
        end = None
        if not self.finished:
            self._leaving = True
            if kind is not KeyboardInterrupt:
                time.sleep(_WORD_SECONDS)
            end = "it was interrupted" if kind is KeyboardInterrupt else str(error).partition("\n")[0] or kind.__name__
        # Before the last word, not after it: whom it ends may be gone before we have said it to all, and is not why we end.
        self._parting = True
        for peer, line in self._lines.items():
            self._send(peer, {"end": end})
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_WR)
        self._parted.set()

    def broadcast(self, function):
        if not self.is_primary:
            return _value(self._inbox[0].get())
        try:
            frame = {"value": function()}
        except UserError as error:
            self._send_all({"error": str(error)})
            raise
        self._send_all(frame)
        return frame["value"]

    def gather(self, value):
        if self.is_primary:
            return [value, *(self._inbox[peer].get()["value"] for peer in sorted(self._lines))]
        self._send(0, {"value": value})
        return [value]

    def any(self, wish):
        if wish and not self._wished:
            self._wished = True
            if not self.is_primary:
                self._send(0, {"wish": True})
        return self.broadcast(lambda: self._wished)

    def _send_all(self, frame: dict):
        for peer in self._lines:
            self._send(peer, frame)

    def _send(self, peer: int, frame: dict):
        # What cannot be sent has no reader any more, which `_listen` finds out.
        with contextlib.suppress(OSError):
            self._lines[peer].sendall(_bytes(frame))

    def _listen(self, peer: int):
        """Takes in what a peer sends, until both have said their last word."""
        with contextlib.suppress(OSError):
            for frame in _frames(self._lines[peer]):
                if "wish" in frame:
                    self._wished = True
                elif "lost" in frame:
                    self._stop(*frame["lost"])
                elif "end" not in frame:
                    self._inbox[peer].put(frame)
                elif frame["end"] is None or self._leaving:  # or both fail, each for what it will say itself
                    self._ended.add(peer)
                else:
                    self._stop(peer, f"has ended with an error ({frame['end']})")
        if peer not in self._ended:
            self._stop(peer, "is gone")
        self._parted.wait()
        self._lines[peer].close()

    def _stop(self, peer: int, how: str):
        """Ends this process, and through the first one all others, because a peer has ended before its time."""
        if self.finished or self._parting:
            return
        self._telling.acquire()  # for good: one thread tells
        if self.is_primary:
            for other in self._lines.keys() - {peer}:
                self._send(other, {"lost": [peer, how]})
        line = (
            f"\nprocess {peer} of {self.count} {how}, so process {self.index} stops too; the same command goes on from the "
            f"newest checkpoint.\n"
        )
        os.write(self._standard_error, line.encode())
        os._exit(EXIT_STATUS)


def connect(
    coordinator: str,
    count: int,
    index: int,
    seconds: float = START_SECONDS,
    say: Callable[[str], None] = lambda line: None,
) -> ProcessGroup:
    """Meets the other processes.

    Args:
      coordinator: `HOST:PORT`, where the first process is to listen; on no other address than this, so loopback stays loopback.
      count: how many processes there are.
      index: which of them this is.
      seconds: how long to wait for the others.
      say: prints one line.

    Raises:
      UserError: an address that is none, processes that do not come in time, or that were told another count.
    """
    host, port = _address(coordinator)
    if count < 1 or not 0 <= index < count:
        raise UserError(
            f"--process={index} --processes={count}: processes are numbered from 0 to one less than their number."
        )
    if count == 1:
        return ProcessGroup()
    say(f"process {index} of {count} meets the others at {coordinator} ...")
    deadline = time.monotonic() + seconds
    barrier = _await_others if index == 0 else _call_first
    return MultiProcessGroup(index, count, host, barrier(coordinator, (host, port), count, index, deadline))


def _address(coordinator: str) -> tuple[str, int]:
    host, colon, port = coordinator.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 2**16):
        raise UserError(
            f"--coordinator={coordinator}: expected HOST:PORT, an address of the machine of process 0 and a free "
            f"port there, for instance 10.0.0.1:2345."
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


def _await_others(
    coordinator: str, address: tuple[str, int], count: int, index: int, deadline: float
) -> dict[int, socket.socket]:
    """Listens until all others have called, and then lets all of them begin."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        listener = socket.create_server(address, family=family, backlog=count)
    except OSError as error:
        raise UserError(
            f"--coordinator={coordinator}: process 0 cannot listen there ({error.strerror}); it must be an address "
            f"of this machine, and the port free."
        ) from None
    lines: dict[int, socket.socket] = {}
    with listener:
        try:
            while len(lines) < count - 1:
                line, hello = _accept(listener, deadline, coordinator, sorted(set(range(1, count)) - lines.keys()))
                lines[hello["process"]] = _checked(line, hello, count, lines)
        except UserError as error:
            _reply(lines, {"error": str(error)})
            for line in lines.values():
                line.close()
            raise
    _reply(lines, {"value": "begin"})
    return lines


def _accept(
    listener: socket.socket, deadline: float, coordinator: str, missing: list[int]
) -> tuple[socket.socket, dict]:
    """The next caller that speaks as a process of a run; strangers are not answered."""
    while True:
        try:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            line, _ = listener.accept()
        except TimeoutError:
            raise UserError(
                f"process {', '.join(map(str, missing))} has not come to --coordinator={coordinator} in time; start "
                f"it, with the same --coordinator and --processes."
            ) from None
        _set_options(line)
        line.settimeout(5)
        with contextlib.suppress(OSError, ValueError):
            hello = _receive(line)
            if isinstance(hello, dict) and hello.keys() == {"process", "processes"}:
                return line, hello
        line.close()


def _checked(line: socket.socket, hello: dict, count: int, lines: dict) -> socket.socket:
    """The line, if its process belongs to this run; both are told otherwise."""
    problem = None
    if hello["processes"] != count:
        problem = (
            f"process {hello['process']} was started with --processes={hello['processes']}, process 0 with {count}"
        )
    elif hello["process"] in lines:
        problem = f"two processes were started with --process={hello['process']}"
    if problem:
        problem += "; start each of them once, with the same --processes."
        _reply({0: line}, {"error": problem})
        line.close()
        raise UserError(problem)
    return line


def _call_first(
    coordinator: str, address: tuple[str, int], count: int, index: int, deadline: float
) -> dict[int, socket.socket]:
    """Calls the first process until it answers, and waits until it says that all are there."""
    while True:
        try:
            line = socket.create_connection(address, timeout=5)
            if line.getsockname() != line.getpeername():  # a port of one's own, where nobody listens yet, may answer
                break
            line.close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"--coordinator={coordinator}: process 0 does not answer there ({error.strerror or error}); is "
                    f"it running, and can this machine reach it?"
                ) from None
        time.sleep(0.2)
    _set_options(line)
    _reply({0: line}, {"process": index, "processes": count})
    # The first process gives up at its own deadline, and says so.
    line.settimeout(max(0.01, deadline - time.monotonic()) + START_SECONDS)
    with contextlib.ExitStack() as failing:
        failing.callback(line.close)
        try:
            _value(_receive(line))
        except (OSError, json.JSONDecodeError):
            raise UserError(
                f"--coordinator={coordinator}: who listens there is not process 0 of a run, or it has ended before "
                f"it began."
            ) from None
        failing.pop_all()
    line.settimeout(None)
    return {0: line}


def _set_options(line: socket.socket):
    """Sends at once; notices a machine that is gone without a word, whether or not anything is on its way there."""
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_SECONDS)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, BOUND_SECONDS * 1000)


def _reply(lines: dict[int, socket.socket], frame: dict):
    for line in lines.values():
        with contextlib.suppress(OSError):
            line.sendall(_bytes(frame))
            line.settimeout(None)


def _bytes(frame: dict) -> bytes:
    return json.dumps(frame).encode() + b"\n"


def _receive(line: socket.socket) -> Any:
    """One frame, byte by byte: what follows it is for whoever reads next. Raises ValueError where there is none."""
    content = b""
    while not content.endswith(b"\n") and len(content) < _HELLO_BYTES:
        byte = line.recv(1)
        if not byte:
            break
        content += byte
    return json.loads(content)


def _frames(line: socket.socket) -> Iterator[dict]:
    with line.makefile("rb") as stream:
        yield from map(json.loads, stream)


def _value(frame: dict) -> Any:
    if "error" in frame:
        raise UserError(frame["error"])
    return frame["value"]


def _check_same(everyone: list[dict[str, str]]):
    for index, settings in enumerate(everyone):
        for key in sorted(everyone[0].keys() | settings.keys()):
            ours, theirs = everyone[0].get(key), settings.get(key)
            if ours != theirs:
                raise UserError(
                    f"process {index} has {key} = {theirs}, process 0 has {ours}; start all processes with the same "
                    f"flags and data."
                )


def _check_shared(directory: pathlib.Path, everyone: list[bool]):
    if not all(everyone):
        raise UserError(
            f"--logdir={directory}: process {everyone.index(False)} does not see what process 0 writes there; all "
            f"processes write their part of a checkpoint, so it must be one directory that all machines share."
        )
