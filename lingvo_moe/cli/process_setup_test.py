"""What a command line changes for its process, and that importing the library changes nothing of it."""

from __future__ import annotations

import os
import subprocess
import sys
import types

from lingvo_moe.cli import process_setup


def test_abandoned_reads_are_not_reported_and_other_exceptions_are(monkeypatch):
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    process_setup.ignore_closed_event_loops()
    for message in ("Event loop is closed", "a bug"):
        sys.unraisablehook(types.SimpleNamespace(exc_value=RuntimeError(message)))
    assert [str(unraisable.exc_value) for unraisable in reported] == ["a bug"]


def test_importing_the_command_line_changes_nothing_of_the_process():
    """A program of one's own that imports the library keeps its hooks and its logging configuration."""
    code = (
        "import logging, sys; hook = sys.unraisablehook\n"
        "import lingvo_moe.cli.main, lingvo_moe.cli.process_setup\n"
        "assert sys.unraisablehook is hook and not logging.getLogger('lingvo_moe').handlers\n"
        "assert not logging.getLogger('absl').filters and not logging.getLogger('asyncio').filters\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
