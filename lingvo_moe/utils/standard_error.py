"""Standard error whose reader may go away: messages are lost then, but not what a command computes."""

from __future__ import annotations

import io


class _Lossy(io.FileIO):
    """A file that drops what it cannot write: the reader of a pipe has ended, a terminal is closed, a disk is full.

    Of a full pipe or terminal whose writes do not wait for a reader, too.
    """

    def write(self, data, /):
        """Writes, or does nothing; returns the number of bytes."""
        try:
            written = super().write(data)
        except OSError:
            written = None
        return memoryview(data).nbytes if written is None else written  # None, too, where a write would have to wait


def lossy(descriptor: int) -> io.TextIOWrapper:
    """Returns a text file, of UTF-8, on an open file descriptor, which it does not close; no write of it fails."""
    buffer = io.BufferedWriter(_Lossy(descriptor, "w", closefd=False))
    return io.TextIOWrapper(buffer, encoding="utf-8", errors="backslashreplace", line_buffering=True)
