"""A run of one process answers every question of a process group by itself; an error of one is that of all."""

from __future__ import annotations

import pytest

from lingvo_moe.distributed.process_group import ProcessGroup
from lingvo_moe.errors import UserError


def test_one_process_agrees_with_itself(tmp_path):
    """The training loop calls the same methods for one process and for many."""
    group = ProcessGroup()
    assert group.is_primary and group.broadcast(lambda: 7) == 7 and group.gather(7) == [7]
    assert group.any_stop_requested(True) and not group.any_stop_requested(False)
    group.require_same({"a": "1"})
    group.require_shared(tmp_path)
    group.finish()
    assert group.finished and not list(tmp_path.iterdir())


class _Known(UserError):
    """An error that a caller tells from others."""


class _Unknown(UserError):
    """One that it does not."""


class _Two(ProcessGroup):
    """This process and another one, which has no error or this one."""

    count = 2

    def __init__(self, other: UserError | None):
        self._other = other

    def gather(self, value):
        """See the base class."""
        return [value, self._other and [type(self._other).__name__, str(self._other)]]


@pytest.mark.parametrize("kind, expected", [(_Known, _Known), (_Unknown, UserError), (UserError, UserError)])
def test_an_error_of_one_process_is_raised_in_all(kind, expected):
    """One that left alone would leave the others in a collective; the kinds that are asked for are kept."""

    def fail():
        raise kind("the cause")

    assert _Two(None).run_in_all(lambda: {1, 2}, (_Known,)) == {1, 2}
    for group, function in ((_Two(kind("the cause")), lambda: 0), (_Two(None), fail), (ProcessGroup(), fail)):
        with pytest.raises(UserError, match="^the cause$") as raised:
            group.run_in_all(function, (_Known,))
        assert type(raised.value) is expected


class _Different(ProcessGroup):
    """This process, with the settings that it is asked about, and another one with these."""

    count = 2

    def __init__(self, others: dict[str, str]):
        self._others = others

    def gather(self, value):
        """See the base class."""
        return [value, {"--processes": "2", **self._others}]


def test_the_first_setting_that_differs_is_named():
    """A setting may decide what comes after it, as `input.seed` decides the hash of the training data."""
    _Different({"seed": "0", "data": "a"}).require_same({"seed": "0", "data": "a"})
    for others, named in (
        ({"seed": "1", "data": "b"}, "process 1 has seed = 1, process 0 has 0;"),
        ({"seed": "0", "data": "b"}, "process 1 has data = b, process 0 has a;"),
        ({"seed": "0", "data": "a", "new": "2"}, "process 1 has new = 2, process 0 has None;"),
    ):
        with pytest.raises(UserError, match=named):
            _Different(others).require_same({"seed": "0", "data": "a"})
