"""Everything that a command line changes for its whole process, done once at its start.

A module of the library changes nothing process-wide when it is imported; what a command needs of that kind is called from here.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from lingvo_moe.cli import logging_setup


def set_up_process():
    """Prepares this process to run a command; `app.run_process` calls it before anything else."""
    logging_setup.silence_libraries()
    ignore_closed_event_loops()


def ignore_closed_event_loops():
    """Stops Python from reporting reads that Orbax abandons.

    When one of several reads fails, Orbax leaves the others to threads that find their event loop closed. The failure itself is
    raised.
    """
    sys.unraisablehook = functools.partial(_report_unless_closed, sys.unraisablehook)


def _report_unless_closed(report: Callable[[Any], object], unraisable: Any):
    if str(unraisable.exc_value) != "Event loop is closed":
        report(unraisable)
