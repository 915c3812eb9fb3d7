"""Runs one test file with pytest, for `bazel test`: `pytest_main.py FILE [ARGUMENT...]`.

Further arguments come from `bazel test --test_arg=...`. If RUN_SIZE is set, a test of another size is only collected,
which imports all that it needs. A file without tests fails.
"""

from __future__ import annotations

import os
import sys

import pytest


def main(arguments: list[str]) -> int:
    """Returns pytest's exit status."""
    size = os.environ["TEST_SIZE"]
    return pytest.main(
        [
            "--config-file=pytest.ini",
            "-p",
            "no:cacheprovider",  # each test runs once, in a directory of its own
            f"--basetemp={os.environ['TEST_TMPDIR']}/pytest",
            *(["--collect-only"] if os.environ.get("RUN_SIZE", size) != size else []),
            *arguments,
        ]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
