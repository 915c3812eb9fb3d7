"""One JAX over many processes: their devices are found together, and a program runs on all of them."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import jax
from jax._src.lib import _jax

from lingvo_moe.distributed import coordination_service
from lingvo_moe.distributed.process_group import MultiProcessGroup, ProcessGroup
from lingvo_moe.errors import UserError

_CONNECT_SECONDS = 60


@contextlib.contextmanager
def joined(processes: ProcessGroup) -> Iterator[None]:
    """Within it JAX finds the devices of all processes; to be entered before any are looked for. For one process it does nothing.

    Raises:
      UserError: JAX's own service, beside process 0, cannot be started or reached.
    """
    if not isinstance(processes, MultiProcessGroup):
        yield
        return
    service, port = _serve(processes) if processes.is_primary else (None, None)
    port = processes.broadcast(lambda: port)
    _check_reachable(processes.host, port)
    _initialise(processes, port)
    try:
        yield
    finally:
        if processes.finished:  # otherwise it would wait for those that do not come any more
            jax.distributed.shutdown()
            if service is not None:
                service.communicate("all have ended\n")


def _initialise(processes: MultiProcessGroup, port: int):
    # gloo would listen where the machine's name leads, to the network as well if all others are on this machine.
    _jax.make_gloo_tcp_collectives = functools.partial(_jax.make_gloo_tcp_collectives, hostname=processes.own_host)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # SIGTERM is ours, see training.stopping
    jax.distributed.initialize(
        _join(processes.host, port),
        processes.count,
        processes.index,
        cluster_detection_method="deactivate",
        coordinator_bind_address="127.0.0.1:0",  # the service that process 0 starts all the same, and nobody calls
        initialization_timeout=_CONNECT_SECONDS,
        heartbeat_timeout_seconds=coordination_service.HEARTBEAT_SECONDS,
    )


def _serve(processes: MultiProcessGroup) -> tuple[subprocess.Popen, int]:
    """Starts JAX's service beside this process; returns it and its port."""
    with socket.create_server((processes.host, 0), family=_family(processes.host)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-P", coordination_service.__file__, _join(processes.host, port), str(processes.count)]
    service = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    if service.stdout.readline() != "ready\n":
        raise UserError(
            f"JAX's service could not be started at {_join(processes.host, port)}, beside process 0; start all "
            f"processes again."
        )
    return service, port


def _check_reachable(host: str, port: int):
    """JAX itself would abort."""
    try:
        socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise UserError(
            f"JAX's service at {_join(host, port)}, beside process 0, cannot be reached ({error.strerror or error}); "
            f"between the machines of a run all TCP ports must be open."
        ) from None


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
