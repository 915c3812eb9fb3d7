"""Addresses of this machine at which a process can listen."""

from __future__ import annotations

import contextlib
import socket


def address() -> str:
    """Returns `127.0.0.1:PORT`, with a port that is free; another process may take it before it is used."""
    return addresses(1)[0]


def addresses(count: int) -> list[str]:
    """Returns as many as `count`, all different; see `address`."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [f"127.0.0.1:{server.getsockname()[1]}" for server in servers]
