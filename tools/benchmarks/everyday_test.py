"""Tests of the CPU time of commands and of the goals."""

from __future__ import annotations

import pytest

from lingvo_moe.errors import UserError
from tools.benchmarks import everyday
from tools.benchmarks.everyday import Row

pytestmark = pytest.mark.slow


def test_cpu_time_of_a_command():
    """The time is that of the whole process; the expected status may be an error."""
    assert 0.05 < everyday.cpu_seconds(["--help"]) < 60
    assert 0.05 < everyday.cpu_seconds(["train", "--model=m4.Quikstart"], status=2) < 60


def test_unexpected_status_is_an_error():
    """The error quotes the command's output."""
    with pytest.raises(
        UserError, match="`train --model=m4.Quikstart` ended with status 2: .*Did you mean m4.Quickstart"
    ):
        everyday.cpu_seconds(["train", "--model=m4.Quikstart"])


def test_goals_are_upper_or_lower_bounds():
    """Protects both kinds of goals, and their words in the table."""
    rows = [
        Row("start", 2.0, 2.0, "CPU s"),
        Row("start", 2.1, 2.0, "CPU s"),
        Row("rate", 20.0, 20.0, "times", at_least=True),
        Row("rate", 19.0, 20.0, "times", at_least=True),
    ]
    assert [row.met for row in rows] == [True, False, True, False]
    lines = everyday.table(rows).splitlines()
    assert (
        lines[2] == "| start | 2.00 CPU s | at most 2 | yes |"
        and lines[5] == "| rate | 19.00 times | at least 20 | no |"
    )
