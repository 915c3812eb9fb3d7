"""Logging of the command line: plain lines on standard error; processes other than the primary one print warnings only.

The library logs with `logging.getLogger(__name__)` and configures nothing, which is left to the importing program.
"""

from __future__ import annotations

import contextlib
import logging
import pathlib
import sys
from collections.abc import Iterator
from typing import TextIO

from absl import logging as absl_logging

_LOGGERS = ("lingvo_moe", "tools")


class _StderrHandler(logging.StreamHandler):
    """Writes to whatever `sys.stderr` is at the time: a progress bar replaces it while it is drawn."""

    def __init__(self):
        logging.Handler.__init__(self)
        self.setFormatter(_PlainFormatter())

    @property
    def stream(self) -> TextIO:
        """The current standard error."""
        return sys.stderr


class _PlainFormatter(logging.Formatter):
    """The message alone; `warning: ` before one that is a warning or worse."""

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        return f"warning: {line}" if record.levelno >= logging.WARNING else line


@contextlib.contextmanager
def plain_lines() -> Iterator[None]:
    """Within it, what this project logs at level INFO or above is printed on standard error, and nowhere else."""
    handler = _StderrHandler()
    with contextlib.ExitStack() as restored:
        for logger in map(logging.getLogger, _LOGGERS):
            restored.callback(_configure, logger, logger.level, logger.propagate, logger.handlers)
            # absl gives the root logger a handler at its first message, which would print ours once more.
            _configure(logger, logging.INFO, False, [*logger.handlers, handler])
        yield


def _configure(logger: logging.Logger, level: int, propagate: bool, handlers: list[logging.Handler]):
    logger.setLevel(level)
    logger.propagate, logger.handlers = propagate, handlers


def warnings_only():
    """Drops messages below WARNING until `plain_lines` ends: of many processes the primary one reports for all."""
    show_from(logging.WARNING)


def show_from(level: int):
    """Drops messages below this level until `plain_lines` ends, or until another call."""
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(level)


def silence_libraries():
    """Drops log records of other libraries that repeat an error which is raised, and reported, anyway."""
    # Made by absl itself: a logger made here under its name would attribute every record to a file of absl's.
    absl_logging.get_absl_logger().addFilter(_is_not_orbax)
    logging.getLogger("asyncio").addFilter(_is_not_unretrieved)
    # It warns that XLA's compiler for GPUs is here without CUDA, which `plan` does not need.
    logging.getLogger("jax_plugins.xla_cuda13").setLevel(logging.ERROR)


def _is_not_orbax(record: logging.LogRecord) -> bool:
    """Orbax logs the errors that it raises as well, with tracebacks."""
    return "orbax" not in pathlib.Path(record.pathname).parts


def _is_not_unretrieved(record: logging.LogRecord) -> bool:
    """When one of several writes fails, Orbax drops the futures of the others, and asyncio reports each of them."""
    return "exception was never retrieved" not in record.getMessage()
