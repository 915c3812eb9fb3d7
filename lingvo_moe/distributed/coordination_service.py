"""Holds JAX's coordination service in a process of its own, for process 0: `python coordination_service.py ADDRESS COUNT`.

In the other processes JAX aborts, with pages of log, at the moment its service is gone. So that a killed process 0 takes it not
along, it is here, and stays a little longer: until the others have ended in their own way, see `processes`. Process 0 holds our
standard input: a line means that all have ended, the end of it without one, that process 0 was killed.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from jaxlib import _jax

# What a process takes to end that knows that another one is gone, with room to spare.
_LINGER_SECONDS = 10.0
# JAX's own way to find out who is gone: only for one that neither ends nor moves.
HEARTBEAT_SECONDS = 300
SHUTDOWN_SECONDS = 10


def main(address: str, count: int):
    """Serves until standard input ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # they are for process 0
        signal.signal(number, signal.SIG_IGN)
    service = _jax.get_distributed_runtime_service(
        address, count, heartbeat_timeout=HEARTBEAT_SECONDS, shutdown_timeout=SHUTDOWN_SECONDS
    )
    print("ready", flush=True)
    if not sys.stdin.readline():
        time.sleep(_LINGER_SECONDS)
    del service
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
