"""The command line without a command: the list of commands, whoever reads it."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest
from absl import flags

from lingvo_moe.cli import app, main, run_config
from lingvo_moe.testing.processes import run_code


@pytest.mark.parametrize("arguments, status", [((), 2), (("--help",), 0), (("-h",), 0), (("help",), 0)])
def test_help_lists_every_command(arguments, status, capsys):
    assert main.main(["lingvo_moe", *arguments]) == status
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert listed == list(main.COMMANDS)


@pytest.mark.parametrize("name", list(main.COMMANDS))
def test_help_of_a_command_has_its_usage_and_examples_that_it_can_parse(name, capsys):
    """The first thing that a user reads must not name a flag that does not exist."""
    assert main.main(["lingvo_moe", name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: python -m lingvo_moe {name} ")
    command = main.COMMANDS[name]
    for example in command.examples:
        assert example.format("python -m lingvo_moe") in shown
        arguments = shlex.split(example.partition("{} ")[2])
        values = flags.FlagValues()
        run_config.define_flags(command.config, values)
        left = app.parse(arguments, values)
        assert left[0] == name


def test_a_reader_that_goes_away_is_no_error():
    """`lingvo_moe --help | head -1` ends with the status of a broken pipe and without a traceback."""
    command = [sys.executable, "-m", "lingvo_moe", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_an_interrupt_during_imports_is_one_line():
    """They take a second; Python would print where it was."""
    code = (
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell ignores it for jobs in the background
        "class Interrupting:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'lingvo_moe.cli.app': signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "from lingvo_moe.__main__ import run\n"
        "run()\n"
    )
    found = run_code(code, succeeds=False)
    assert (found.returncode, found.stdout, found.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize(
    "count, expected",
    [
        (12_345_678, "12.3M"),
        (999_499, "999499"),
        (999_600_000, "1B"),
        (999_499_000_000, "999B"),
        (999_600_000_000, "1T"),
    ],
)
def test_counts_have_three_digits(count, expected):
    assert main._short(count) == expected
