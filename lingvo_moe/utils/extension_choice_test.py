"""A registered dataclass is made from the text of a flag, and each mistake in the text is named."""

from __future__ import annotations

import dataclasses
import types

import pytest

from lingvo_moe.errors import UserError
from lingvo_moe.extensions import Registry
from lingvo_moe.utils import extension_choice

SCALAR = types.SimpleNamespace(dtype="float32", shape=())  # as a tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    first: int
    second: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thing:
    size: int
    scale: float = 1.0
    exact: bool = False
    limit: int | None = None
    name: str = ""
    parts: tuple[int, ...] = ()

    def __post_init__(self):
        if self.size < 0:
            raise UserError("size is negative.")


@pytest.fixture
def things() -> Registry:
    registry: Registry = Registry("thing")
    registry.register("plain", Thing)
    registry.register("pair", Pair)
    return registry


def test_fields_have_settings_defaults_and_own_defaults(things):
    """In this order of precedence; defaults for fields that the class does not have are left out."""
    defaults = {"size": 3, "scale": 2.0, "other": 1}
    assert extension_choice.make(things, "plain", defaults) == Thing(size=3, scale=2.0)
    found = extension_choice.make(things, "plain:scale=0.5:exact=true:limit=4:name=a b", defaults)
    assert found == Thing(size=3, scale=0.5, exact=True, limit=4, name="a b")
    assert extension_choice.make(things, "plain:size=1:limit=none").limit is None


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("plan", "thing 'plan' is unknown. Did you mean plain"),
        ("plain:sise=1", "thing 'plain:sise=1': there is no field 'sise'. Did you mean size.*Fields: size, scale"),
        ("plain:size=x", "size=x: expected a whole number"),
        ("plain:size=1:scale=x", "scale=x: expected a number"),
        ("plain:size=1:exact=x", "exact=x: expected true or false"),
        ("plain:size", "expected a whole number"),
        ("plain:size=1:parts=2", "a field of this type cannot be set by a flag"),
        ("plain", "field size has no value; write plain:size=VALUE"),
        ("plain:size=-1", "size is negative"),
        ("pair", "field first has no value"),
        (Thing(size=3), r"thing Thing\(.*\): expected the text NAME or NAME:field=value"),
    ],
)
def test_mistakes_are_named(things, choice, message):
    with pytest.raises(UserError, match=message):
        extension_choice.make(things, choice)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"opened": SCALAR}, "metric_names declares open, seen, but a call returned opened. Give both the same names"),
        ({"open": SCALAR}, "metric_names declares open, seen, but a call returned open"),
        ({}, "metric_names declares open, seen, but a call returned no metric"),
        ({"open": SCALAR, "seen": 1.0}, "metric seen is a float; expected a float32 scalar tensor"),
    ],
)
def test_other_metrics_than_the_declared_ones_are_named(things, returned, message):
    """A curve of a metric that nobody returns would show zeros, and one that nobody declares would be lost."""

    class Measured(Thing):
        metric_names = ("seen", "open")

    things.register("measured", Measured)
    extension_choice.check_metrics(things, Measured(size=1), {"open": SCALAR, "seen": SCALAR})
    with pytest.raises(UserError, match=f"^thing 'measured': {message}"):
        extension_choice.check_metrics(things, Measured(size=1), returned)
