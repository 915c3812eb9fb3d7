"""The command line without a command: the list of commands, whoever reads it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lingvo_moe.cli import main


@pytest.mark.parametrize("arguments, status", [((), 2), (("--help",), 0), (("-h",), 0), (("help",), 0)])
def test_help_lists_every_command(arguments, status, capsys):
    assert main.main(["lingvo_moe", *arguments]) == status
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert listed == list(main.COMMANDS)


def test_a_reader_that_goes_away_is_no_error():
    """`lingvo_moe --help | head -1` ends with the status of a broken pipe and without a traceback."""
    command = [sys.executable, "-m", "lingvo_moe", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141
