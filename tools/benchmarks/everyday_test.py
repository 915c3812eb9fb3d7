"""Commands are measured to their end, one that fails is quoted, and a page tells what met its goal."""

from __future__ import annotations

import pytest

from lingvo_moe.errors import UserError
from tools.benchmarks import everyday
from tools.benchmarks.everyday import Row

pytestmark = pytest.mark.slow


def test_a_command_has_the_cpu_time_of_its_process():
    assert 0.05 < everyday.cpu_seconds(["--help"]) < 60
    assert 0.05 < everyday.cpu_seconds(["train", "--model=m4.Quikstart"], status=2) < 60


def test_a_command_that_ends_otherwise_is_quoted():
    with pytest.raises(
        UserError, match="`train --model=m4.Quikstart` ended with status 2: .*Did you mean m4.Quickstart"
    ):
        everyday.cpu_seconds(["train", "--model=m4.Quikstart"])


def test_a_goal_is_met_from_its_side():
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
