"""Free addresses can be listened at."""

from __future__ import annotations

import contextlib
import socket

from lingvo_moe.utils import free_ports


def test_addresses_differ_and_are_free():
    found = free_ports.addresses(3)
    assert len(set(found)) == 3
    with contextlib.ExitStack() as stack:
        for host, _, port in (address.partition(":") for address in found):
            stack.enter_context(socket.create_server((host, int(port))))
