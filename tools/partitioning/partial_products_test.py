"""Protects the three plans of U V W, and one reduction for two products: what is reduced, and what that saves."""

from __future__ import annotations

import pytest

from lingvo_moe.analysis.collectives import find_collectives
from lingvo_moe.analysis.hlo import Module
from lingvo_moe.cli import app
from lingvo_moe.engines.topology import Slice
from lingvo_moe.errors import OutOfMemory
from lingvo_moe.lazy import tf
from lingvo_moe.program import lower
from lingvo_moe.sharding.layout import DeviceMesh, Layout, Spec
from lingvo_moe.sharding.partial import partial_sum, reduce
from lingvo_moe.testing.plans import stride
from tools.partitioning import partial_products
from tools.partitioning.partial_products import PLANS, measure

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


@pytest.mark.parametrize(
    "order, reductions", [("deferred", 1), ("x + (attention + feed_forward)", 1), ("(x + attention) + feed_forward", 2)]
)
def test_two_products_of_a_block_share_one_reduce_scatter(order, reductions):
    """Attention's output and a feed-forward layer's: on GSPMD's 2-D layout P -> S is a ReduceScatter over y.

    The compiler joins two by itself where they are added to each other, but not with the residual in between.
    """
    layout = Layout.of(DeviceMesh((4, 2)))
    axes = {"x": "BTM", "attended": "BTND", "output": "NDM", "hidden": "BTH", "wo": "HM"}
    sizes = {"B": 16, "T": 256, "N": 8, "D": 128, "H": 4096, "M": 1024}
    specs = {name: Spec(tuple(sizes[letter] for letter in a), "float32", a) for name, a in axes.items()}

    def function(i: dict) -> dict:
        block = (("BTND,NDM->BTM", i["attended"], i["output"]), ("BTH,HM->BTM", i["hidden"], i["wo"]))
        if order == "deferred":
            first, second = (partial_sum(*factors, layout) for factors in block)
            return {"y": i["x"] + reduce(first + second)}
        first, second = (layout.annotate(tf.einsum(*factors), "BTM") for factors in block)
        return {"y": i["x"] + (first + second) if order.startswith("x") else (i["x"] + first) + second}

    hlo = Slice.of("v3:2x2x1").compile(lower("block", function, specs, {"y": "BTM"}, layout)).hlo()
    found = [c for c in find_collectives(Module(hlo, 8)) if c.kind == "reduce-scatter"]
    assert [(c.group_size, stride(c), c.bytes) for c in found] == [(2, 1, 4 * 4 * 256 * 512)] * reductions


@pytest.mark.parametrize("sizes", ["8,8,8", "8,8,8,many", "8,8,8,12", "8,8,8,1048584", f"8,8,8,{'8' * 5000}"])
def test_invalid_sizes(sizes, capsys):
    """An error of one line before anything is compiled."""
    assert app.execute(partial_products.main, ["partial_products", f"--sizes={sizes}"], partial_products._VALUES) == 2
    assert f"--sizes={sizes}: expected four multiples of 8" in capsys.readouterr().err


def test_sizes_that_do_not_fit_are_named(monkeypatch, capsys):
    """The compiler's answer is an error of the flag, not a traceback."""

    def refuse(name, sizes):
        raise OutOfMemory(2**35, 2**34)

    monkeypatch.setattr(partial_products, "measure", refuse)
    arguments = ["partial_products", "--sizes=8,8,1048576,8"]
    assert app.execute(partial_products.main, arguments, partial_products._VALUES) == 2
    assert "--sizes=8,8,1048576,8: 32.00 GiB of a device's 16.00 GiB are needed; pass" in capsys.readouterr().err
