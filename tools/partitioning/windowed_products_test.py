"""Protects the comparison of windowed einsums with gathered ones: communication, memory and overlap."""

from __future__ import annotations

import functools

import pytest

from lingvo_moe.cli import app
from tools.partitioning import windowed_products
from tools.partitioning.windowed_products import FORMS, PRODUCTS, Figures

pytestmark = pytest.mark.slow

GATHERED, _, EXPLICIT = FORMS


@functools.cache  # both tests read the figures of Dense1T without gradients
def measured(name: str, form: str, gradients: bool = False) -> Figures:
    return windowed_products.measure(PRODUCTS[name], form, gradients)


@pytest.mark.parametrize("name", ["T(96L) on 8 cores", "Dense1T on 8 cores"])
def test_slices_take_less_memory_and_are_sent_during_the_product(name):
    """All of the CollectivePermutes of the explicit form, and most of those of XLA's."""
    gathered, by_xla, explicit = (measured(name, form) for form in FORMS)
    assert [c.kind for c in gathered.collectives] == ["all-gather"]
    assert {c.kind for c in (*by_xla.collectives, *explicit.collectives)} == {"collective-permute"}
    assert sum(c.times for c in explicit.collectives) == 7
    assert max(by_xla.temporaries, 2 * explicit.temporaries) < gathered.temporaries
    assert explicit.hidden == pytest.approx(explicit.collective) and by_xla.hidden > 0.7 * by_xla.collective
    assert gathered.hidden == 0


def test_slices_win_where_weights_are_large_and_devices_have_few_tokens():
    """1T's layer on 8 cores, also with gradients: less time and less than half the memory (docs/operators.md)."""
    for gradients in (False, True):
        gathered, explicit = (measured("Dense1T on 8 cores", form, gradients) for form in (GATHERED, EXPLICIT))
        assert explicit.seconds < gathered.seconds
        assert 2 * explicit.temporaries < gathered.temporaries
        assert {c.kind for c in explicit.collectives} == {"collective-permute"}


def test_an_unknown_product_is_an_error(capsys):
    """Of one line, before anything is compiled."""
    flags = ["windowed_products", "--products=T(96L) on 9 cores"]
    assert app.execute(windowed_products.main, flags, windowed_products._VALUES) == 2
    assert "no product 'T(96L) on 9 cores'. Did you mean T(96L) on 8 cores" in capsys.readouterr().err
