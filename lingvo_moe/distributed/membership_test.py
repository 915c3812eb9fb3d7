"""Which process of which run this is: flags win, a launcher's variables fill the gaps, contradictions are errors."""

from __future__ import annotations

import pytest

from lingvo_moe.distributed import membership
from lingvo_moe.distributed.membership import Membership
from lingvo_moe.errors import UserError

_SLURM = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}
_OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}


@pytest.mark.parametrize(
    ("flags", "environment", "expected"),
    [
        ((None, None, None), {}, None),
        ((None, 1, None), _SLURM, None),
        ((None, None, None), {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
        (("[::1]:2345", 2, 1), {}, Membership(2, 1, "[::1]:2345")),
        ((None, None, None), _SLURM, Membership(4, 3)),
        ((None, None, None), _OPEN_MPI, Membership(2, 1)),
        ((None, None, None), _SLURM | _OPEN_MPI, Membership(2, 1)),
        ((None, None, None), {"SLURM_PROCID": ""} | _OPEN_MPI, Membership(2, 1)),
        (("10.0.0.1:2345", None, None), _SLURM, Membership(4, 3, "10.0.0.1:2345")),
        (("10.0.0.1:2345", 2, 0), _SLURM, Membership(2, 0, "10.0.0.1:2345")),
        ((None, 8, None), _SLURM, Membership(8)),
        ((None, 8, None), {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, Membership(8)),
    ],
)
def test_flags_win_over_what_a_launcher_has_set(flags, environment, expected):
    """A run that takes itself for another one would train alone, or write into the same directory as its peers."""
    assert membership.find(*flags, environment) == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("nowhere", 2, 0), "--coordinator=nowhere: expected HOST:PORT"),
        (("10.0.0.1:", 2, 0), "expected HOST:PORT"),
        (("127.0.0.1:1234567", 2, 0), "expected HOST:PORT"),
        (("127.0.0.1:1", 2, 2), "--processes=2 --process=2: processes are numbered"),
        (("127.0.0.1:1", 0, 0), "--processes=0"),
        (("127.0.0.1:1", None, None), "--coordinator=127.0.0.1:1 without --processes"),
        ((None, None, 1), "--process=1 without --processes"),
        ((None, 8, None), "--processes=8: neither Slurm nor Open MPI"),
        (("10.0.0.1:1", 8, None), "--processes=8: neither Slurm nor Open MPI"),
    ],
)
def test_contradictions_are_reported_before_any_process_waits(flags, message):
    with pytest.raises(UserError, match=message):
        membership.find(*flags, {})


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            _SLURM | {"SLURM_STEP_NUM_TASKS": ""},
            "SLURM_STEP_NUM_TASKS=, where Slurm writes a whole number; unset SLURM",
        ),
        (_OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "-1"}, "OMPI_COMM_WORLD_RANK=-1, where Open MPI"),
    ],
)
def test_a_variable_that_no_launcher_sets_so_is_named(environment, message):
    """A script may have emptied it."""
    with pytest.raises(UserError, match=message):
        membership.find(None, None, None, environment)
