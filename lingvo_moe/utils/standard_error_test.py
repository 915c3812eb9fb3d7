"""Protects long commands from the loss of their log."""

from __future__ import annotations

import os

from lingvo_moe.utils import standard_error


def test_messages_without_a_reader_are_dropped():
    """`train 2>&1 | head` and a closed terminal do not end a training; messages with a reader arrive."""
    reader, writer = os.pipe()
    with standard_error.lossy(writer) as stream:
        print("ß\udcff", file=stream)
        assert os.read(reader, 100) == "ß\\udcff\n".encode()
        os.close(reader)
        for _ in range(3):
            print("lost", file=stream, flush=True)
    os.close(writer)
