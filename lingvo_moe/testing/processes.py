"""Runs Python code in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any


def run_code(
    code: str, *arguments: str, environment: Mapping[str, str] = os.environ, succeeds: bool = True, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Runs code that can import what this process can; returns its status, output and errors.

    Args:
      code: what `python -c` runs.
      arguments: of the process.
      environment: its variables.
      succeeds: whether any other exit status than 0 fails the test.
      options: further arguments of `subprocess.run`.
    """
    process = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        **options,
    )
    assert process.returncode == 0 or not succeeds, process.stderr
    return process
