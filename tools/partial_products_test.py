"""Protects the three plans of U V W: which tensors they reduce, and what the delayed reduction saves."""

from __future__ import annotations

import pytest

from lingvo_moe.cli import app
from tools import partial_products
from tools.partial_products import PLANS, measure

pytestmark = pytest.mark.slow

_SIZES = (1024, 512, 2048, 128)


def test_a_delayed_reduction_is_of_the_smaller_product():
    """U V is 1024 x 2048, Y 1024 x 128. Reduced twice, both are summed.

    The compiler sums U V in bfloat16, as the matrix unit rounds it for the product with W, and Y in float32.
    """
    delayed, at_once, twice = (measure(name, _SIZES) for name in PLANS)
    assert delayed[0] == [("all-reduce", 4 * 1024 * 128)]
    assert at_once[0] == [("all-reduce", 2 * 1024 * 2048)]
    of_product, of_result = twice[0]
    assert of_product in [("all-reduce", 2 * 1024 * 2048), ("reduce-scatter", 2 * 1024 * 2048 // 8)]
    assert of_result == ("all-reduce", 4 * 1024 * 128)
    assert 0 < delayed[2] < at_once[2] < twice[2] and min(found[1] for found in (delayed, at_once, twice)) > 0


@pytest.mark.parametrize("sizes", ["8,8,8", "8,8,8,many", "8,8,8,12"])
def test_invalid_sizes(sizes, capsys):
    """An error of one line before anything is compiled."""
    assert app.execute(partial_products.main, ["partial_products", f"--sizes={sizes}"], partial_products._VALUES) == 2
    assert f"--sizes={sizes}: expected four multiples of 8" in capsys.readouterr().err
