"""What `translate` reads: lines of a text, or the texts of a gettext catalog."""

from __future__ import annotations

import codecs
import dataclasses
import logging
import os
import pathlib
import sys

from lingvo_moe.cli.run_config import TranslateConfig
from lingvo_moe.errors import UserError
from lingvo_moe.inference.po_catalog import PoCatalog

_logger = logging.getLogger(__name__)
_PO_SUFFIXES = (".po", ".pot")
# Of catalogs, whose lines are no sentences; docs/own_texts.md has commands that convert them.
_OTHER_CATALOGS = (".arb", ".json", ".mo", ".properties", ".resx", ".strings", ".tmx", ".ts", ".xlf", ".xliff", ".xml")


@dataclasses.dataclass(frozen=True)
class Lines:
    """The lines of a text, each of which becomes a line.

    Attributes:
      sentences: the lines.
    """

    sentences: list[str]

    @property
    def line_numbers(self) -> range:
        """The number of each, from 1."""
        return range(1, len(self.sentences) + 1)


def check(config: TranslateConfig):
    """Raises UserError for an input that is not there or of another format, and flags that do not suit a catalog."""
    path = config.input
    if path == "-":
        return
    check_file(path, "one sentence a line, or a .po catalog")
    suffix = pathlib.Path(path).suffix.lower()
    if suffix in _OTHER_CATALOGS:
        raise UserError(
            f"--input={path}: a catalog of this format is not read, and its lines are no sentences. Convert it to .po "
            f"(docs/own_texts.md); to translate each line all the same, pass them on standard input."
        )
    if suffix in _PO_SUFFIXES and (config.n_best > 1 or config.scores):
        raise UserError(
            f"--input={path} is a catalog, which has one translation of each text and no scores; leave --n_best and "
            f"--scores out. --doubtful=FILE lists confidences."
        )


def check_file(path: str, expected: str):
    """Raises UserError, which says what is expected, for an input that is not there or a directory."""
    if path != "-" and not os.path.exists(path):
        raise UserError(f"--input={path}: there is no such file; expected {expected}.")
    if os.path.isdir(path):
        raise UserError(f"--input={path} is a directory; expected a file of {expected}.")


def read(path: str) -> Lines | PoCatalog:
    """Reads a file, or standard input; raises UserError naming a line that is not text, or a catalog that is none."""
    if pathlib.Path(path).suffix.lower() in _PO_SUFFIXES:
        return PoCatalog(pathlib.Path(path))
    return Lines(read_lines(path, "sentence"))


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
