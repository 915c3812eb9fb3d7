"""The lines of a text that a command reads from `--input`."""

from __future__ import annotations

import codecs
import logging
import os
import pathlib
import sys

from lingvo_moe.errors import UserError

_logger = logging.getLogger(__name__)


def check_file(path: str, expected: str):
    """Raises UserError, which says what is expected, for an input that is not there or a directory."""
    if path == "-":
        return
    if not os.path.exists(path):
        raise UserError(f"--input={path}: there is no such file; expected {expected}.")
    if os.path.isdir(path):
        raise UserError(f"--input={path} is a directory; expected a file of {expected}.")


def read_lines(path: str, what: str) -> list[str]:
    """Reads the lines of a file, or of standard input; `what` a line is, for messages. Raises UserError as `read`."""
    if path == "-" and sys.stdin.isatty():
        _logger.info("reading %ss from the terminal, one a line; Ctrl-D ends them.", what)
    try:
        data = sys.stdin.buffer.read() if path == "-" else pathlib.Path(path).read_bytes()
    except OSError as error:  # of a read, which does not name the file
        raise UserError(f"--input={path}: cannot be read ({error.strerror}); expected one {what} a line.") from None
    lines = data.removeprefix(codecs.BOM_UTF8).split(b"\n")
    lines = lines[:-1] if lines[-1] == b"" else lines
    sentences = []
    for number, line in enumerate(lines, start=1):
        try:
            sentences.append(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise UserError(
                f"--input={path}, line {number}: not UTF-8 (byte {error.start + 1} of the line); convert it, for "
                f"instance with iconv."
            ) from None
        if "\0" in sentences[-1]:
            raise UserError(
                f"--input={path}, line {number}: holds a NUL byte; expected a text file, one {what} a line. "
                f"`tr -d '\\000'` removes such bytes."
            )
    return sentences
