"""`--set` parses values by type, changes nested fields together, and explains mistakes."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lingvo_moe import overrides
from lingvo_moe.errors import UserError
from lingvo_moe.sharding.layout import DeviceMesh


@dataclasses.dataclass(frozen=True)
class Inner:
    count: int = 1
    rate: float = 0.5
    on: bool = False
    ids: tuple[int, ...] = (1, 2)
    limit: float | None = None


@dataclasses.dataclass(frozen=True)
class Outer:
    first: Inner = Inner()
    second: Inner = Inner()
    name: str = "a"
    mesh: DeviceMesh = DeviceMesh()


def test_every_type_is_parsed():
    """Values have the field's type, not that of text."""
    changed = overrides.apply(
        Outer(),
        [
            "first.count=7",
            "first.rate=1e-3",
            "first.on=true",
            "first.ids=(3, 4, 5)",
            "first.limit=2",
            "name=x=y",
            "mesh=4x2",
        ],
    )
    assert changed == Outer(Inner(7, 1e-3, True, (3, 4, 5), 2.0), Inner(), "x=y", DeviceMesh((4, 2)))
    assert overrides.apply(changed, ["first.limit=none"]).first.limit is None


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("first.count=1.5", "expected a whole number"),
        ("first.rate=fast", "expected a number"),
        ("first.on=maybe", "true or false"),
        ("count=3", "count is ambiguous: first.count, second.count"),
        ("first.cuont=3", "Did you mean first.count"),
        ("first.count", "write field=value"),
        ("mesh=big", "device mesh"),
        ("nothing_like_it=1", "show NAME"),
    ],
)
def test_mistakes_name_field_and_remedy(assignment, message):
    """One line is enough to correct each of these."""
    with pytest.raises(UserError, match=message):
        overrides.apply(Outer(), [assignment])


def test_unambiguous_end_of_a_path_is_enough():
    """`name` and `mesh` need no path."""
    assert overrides.apply(Outer(), ["name=b"]).name == "b"


def test_the_last_assignment_to_a_field_counts():
    """A command asks for it before it applies them."""
    assert overrides.assigned(["mesh=8", "first.mesh=2", " mesh = 4x2 ", "mesh"], "mesh") == "4x2"
    assert overrides.assigned(["mesh", "meshes=3"], "mesh") is None


@given(st.integers(-(10**9), 10**9), st.floats(allow_nan=False), st.booleans(), st.lists(st.integers(-99, 99)))
def test_values_that_show_prints_can_be_set(count, rate, on, ids):
    """`show` and `--set` use the same notation."""
    original = Outer(first=Inner(count, rate, on, tuple(ids)))
    assignments = [f"{path}={value}" for path, value in overrides.fields(original)]
    assert overrides.apply(Outer(), assignments) == original
