"""Files that a command writes for a person: checked before hours of work, and never half there."""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import TextIO

from lingvo_moe.errors import UserError


def check_place(flag: str, path: str | None):
    """Raises UserError where no file can be written to `path`, before hours of work find out."""
    if path in (None, "-"):
        return
    if os.path.isdir(path):
        raise UserError(f"{flag}={path} is a directory; expected the name of a file.")
    if os.path.exists(path) and not os.path.isfile(
        path
    ):  # to put a file in the place of /dev/null would break the machine
        raise UserError(f"{flag}={path} is no file but a device or a pipe; expected the name of a file.")
    directory = os.path.dirname(path) or "."
    if not os.path.isdir(directory):
        raise UserError(f"{flag}={path}: there is no directory {directory}; make it first.")


@contextlib.contextmanager
def writing(path: str) -> Iterator[TextIO]:
    """Standard output, or a file that replaces `path` only when it is complete."""
    if path == "-":
        yield sys.stdout
        return
    partial = pathlib.Path(f"{path}.partial")
    try:
        with open(partial, "w", encoding="utf-8") as file:
            yield file
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
