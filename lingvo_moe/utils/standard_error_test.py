"""Protects long commands from the loss of their log."""

from __future__ import annotations

import contextlib
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


def test_messages_for_a_full_pipe_are_dropped():
    """A terminal or a pipe that another program has made non-blocking refuses a write instead of waiting."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    with standard_error.lossy(writer) as stream:
        print("lost", file=stream, flush=True)
        os.read(reader, 2**20)
        print("read", file=stream, flush=True)
        assert os.read(reader, 2**20) == b"read\n"
    os.close(reader)
    os.close(writer)
