"""Several processes connected by JAX's distributed runtime: a program runs on the devices of all of them.

JAX finds the processes, detects the loss of one and ends the others; `watchdog` reports that. Only the public API of
JAX and Orbax is used.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import multihost

from lingvo_moe.distributed.membership import Membership
from lingvo_moe.distributed.process_group import ProcessGroup
from lingvo_moe.distributed.watchdog import BOUND_SECONDS, HEARTBEAT_SECONDS
from lingvo_moe.errors import UserError

# How long processes wait for each other at the start.
START_SECONDS = 300
# How long they wait for each other at the end, after a barrier that all have passed.
_SHUTDOWN_SECONDS = 60
# Process 0 stays this long after an error: the others abort when it ends, and may be about to report the same error.
_LINGER_SECONDS = 10.0
# A barrier has no time limit of its own: the runtime ends a process that waits for a lost one.
_NO_LIMIT_MS = 2**31 - 1

_logger = logging.getLogger(__name__)


class JaxProcessGroup(ProcessGroup):
    """The processes that JAX's distributed runtime has connected.

    Values travel as bytes in an all-gather of the devices, after a barrier of the coordination service: the first
    collective of two processes fails when one comes to it half a minute after the other.
    """

    catches_sigterm = True

    def __init__(self, member: Membership):
        """Makes the group, after `jax.distributed.initialize`."""
        self.count = member.count
        self._index = member.index
        self._barriers = itertools.count()
        self._sync_points = itertools.count(1)
        self._notified = self._stopping = False

    @property
    def index(self) -> int:
        """The number of this process, from 0."""
        return jax.process_index() if self._index is None else self._index

    def broadcast(self, function: Callable[[], Any]) -> Any:
        """See the base class."""
        result = self.gather(_result(function) if self.is_primary else None)[0]
        if "error" in result:
            raise UserError(result["error"])
        return result["value"]

    def gather(self, value: Any) -> list:
        """See the base class."""
        self.barrier()
        content = json.dumps(value).encode()
        lengths = multihost_utils.process_allgather(np.int32(len(content)))
        padded = np.zeros(1 << int(lengths.max()).bit_length(), np.uint8)  # a power of two: a new size is compiled
        padded[: len(content)] = np.frombuffer(content, np.uint8)
        rows = multihost_utils.process_allgather(padded)
        return [json.loads(row[:length].tobytes()) for row, length in zip(rows, lengths)]

    def any_stop_requested(self, stop_requested: bool) -> bool:
        """See the base class. JAX's preemption service catches SIGTERM; another request becomes that signal."""
        if stop_requested and not self._notified:
            self._notified = True
            os.kill(os.getpid(), signal.SIGTERM)
        self._stopping |= multihost_utils.reached_preemption_sync_point(next(self._sync_points))
        return self._stopping

    def barrier(self):
        """See the base class."""
        key = f"lingvo_moe/{next(self._barriers)}"
        multihost.get_barrier_sync_fn()(key=key, timeout_ms=_NO_LIMIT_MS)


@contextlib.contextmanager
def join(
    member: Membership, platform: str | None = None, start_seconds: int = START_SECONDS
) -> Iterator[JaxProcessGroup]:
    """Connects the processes of a run, so that JAX finds the devices of all. Enter it before JAX looks for devices.

    Call `watchdog.supervise` first: JAX aborts a process that cannot continue.

    Args:
      member: which process of which run this is.
      platform: the platform of the devices; None for the one that JAX prefers.
      start_seconds: how long the processes wait for each other.

    Yields:
      The group.

    Raises:
      UserError: process 0 cannot listen at its address, or JAX detects no cluster to complete `member` from.
    """
    _logger.info("%s waits for the others at %s ...", member.name, member.coordinator or "the address that JAX detects")
    if platform == "cpu":
        jax.config.update("jax_platforms", platform)  # the group's collectives run on JAX's default devices
    _initialize(member, start_seconds)
    group = JaxProcessGroup(member)
    try:
        yield group
        group.finish()
    except BaseException as error:
        _await_others(group, error)
        raise
    finally:
        if group.finished:  # otherwise it would wait for processes that never come
            jax.distributed.shutdown()


def _initialize(member: Membership, start_seconds: int):
    if member.coordinator and member.index == 0:
        _require_free(member)
    complete = None not in (member.coordinator, member.index)
    try:
        jax.distributed.initialize(
            member.coordinator,
            member.count,
            member.index,
            cluster_detection_method="deactivate" if complete else None,
            coordinator_bind_address=member.coordinator,  # loopback stays loopback
            initialization_timeout=start_seconds,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
        )
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"{member.name}: JAX detects no cluster that names the other processes ({error}); pass --coordinator, "
            f"--processes and --process (docs/processes.md)."
        ) from error


def _require_free(member: Membership):
    """Raises UserError where process 0 cannot listen; JAX's service would crash."""
    host, port = member.address
    try:
        # Not `socket.create_server`, which adds the address to the text of an error.
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen()
    except OSError as error:
        raise UserError(
            f"--coordinator={member.coordinator}: process 0 cannot listen there ({error.strerror or error}); it must "
            f"be an address of this machine, and the port free."
        ) from None


def _result(function: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": function()}
    except UserError as error:
        return {"error": str(error)}


def _await_others(group: ProcessGroup, error: BaseException):
    """Waits after an error: for the runtime's abort if a lost process is the cause, else for others that fail alike."""
    if group.finished or isinstance(error, KeyboardInterrupt):
        return
    if not isinstance(error, UserError) or _is_of_runtime(error):
        time.sleep(BOUND_SECONDS)
    elif group.is_primary:
        time.sleep(_LINGER_SECONDS)


def _is_of_runtime(error: BaseException) -> bool:
    """Returns whether a JAX error caused `error`: a collective or a barrier that lost a process."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    # The chain has a cycle where an error that was reported is raised again, as by closing what could not be written.
    while cause is not None and not any(cause is each for each in causes):
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    return any(isinstance(each, jax.errors.JaxRuntimeError) for each in causes)
