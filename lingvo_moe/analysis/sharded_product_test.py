"""Protects the model of a divided product: GShard's table of partitioned operators, and bytes counted by hand."""

from __future__ import annotations

import pytest

from lingvo_moe.analysis.hardware import GENERATIONS, Torus
from lingvo_moe.analysis.sharded_product import Machine, Partitioner, Product, Tensor

# 4 x 8 cores: x has stride 8, y is within two chips of a row.
_MACHINE = Machine((4, 8), Torus(GENERATIONS["v3"], (4, 4, 1)), 60e12, 450e9)
_SIZES = {"A": 4096, "B": 8192, "C": 2048}


def divide(left: str, right: str, out: str, **shardings):
    """Divides a product of tensors whose logical axes are on the given mesh axes, `AB=(0, -1)`."""
    replicated = {axes: (-1,) * len(axes) for axes in (left, right, out)}
    product = Product(Tensor("left", left), Tensor("right", right, 1, True), Tensor("out", out), 2, 4)
    return Partitioner(replicated | shardings, _SIZES, _MACHINE).divide(product)


def moves(division) -> list[tuple[str, int, float]]:
    return [(move.kind, move.axis, move.size) for move in division.moves]


def test_a_dimension_of_one_operand_and_the_result_needs_no_communication():
    """GShard table 4: Matmul(AB,BC->AC) with A of all."""
    division = divide("AB", "BC", "AC", AB=(0, -1), AC=(0, -1))
    assert not division.moves
    assert division.seconds == pytest.approx(2 * 4096 * 8192 * 2048 / 4 / 60e12)


def test_a_sum_over_a_sharded_dimension_is_an_all_reduce_of_the_result():
    """GShard table 4: Matmul(AB,BC->AC) with B; the result has four bytes an element."""
    division = divide("AB", "BC", "AC", AB=(-1, 0), BC=(0, -1))
    assert moves(division) == [("all-reduce", 0, 4096 * 2048 * 4)]


def test_a_sharded_sum_is_a_reduce_scatter():
    """Of the result's part on each device."""
    division = divide("AB", "BC", "AC", AB=(-1, 1), BC=(1, -1), AC=(1, -1))
    assert moves(division) == [("reduce-scatter", 1, 4096 * 2048 * 4 / 8)]


def test_parts_of_one_tile_are_reduced_and_sliced():
    """libtpu writes no ReduceScatter whose last dimension is 128 or less: here C = 1024 among 8."""
    replicated = {"AB": (-1, 1), "BC": (1, -1), "AC": (-1, 1)}
    product = Product(Tensor("left", "AB"), Tensor("right", "BC"), Tensor("out", "AC"), 2, 4)
    division = Partitioner(replicated, _SIZES | {"C": 1024}, _MACHINE).divide(product)
    assert moves(division) == [("all-reduce", 1, 4096 * 1024 * 4)]


def test_a_weight_that_is_sharded_along_the_batch_is_gathered():
    """Weight-update sharding: operands are sent in two bytes an element."""
    division = divide("AB", "BC", "AC", AB=(0, -1), BC=(0, -1), AC=(0, -1))
    assert moves(division) == [("all-gather", 0, 8192 * 2048 * 2)]
    assert division.moves[0].is_weight


def test_backward_products_have_the_collectives_of_the_gradients():
    """A replicated weight of a sharded batch: its gradient alone is reduced (data parallelism)."""
    product = Product(Tensor("x", "AB"), Tensor("w", "BC", 1, True), Tensor("y", "AC"), 2, 4)
    partitioner = Partitioner({"AB": (0, -1), "BC": (-1, -1), "AC": (0, -1)}, _SIZES, _MACHINE)
    of_inputs, of_weight = (partitioner.divide(backward) for backward in product.backward())
    assert not of_inputs.moves
    assert moves(of_weight) == [("all-reduce", 0, 8192 * 2048 * 4)]


def test_a_transposition_of_axes_is_an_all_to_all():
    """GShard section 3.2: from groups to experts; each device keeps its share of the bytes."""
    shardings = {"GEC": (0, -1, -1), "EGC": (0, -1, -1)}
    partitioner = Partitioner(shardings, {"G": 64, "E": 16, "C": 32}, _MACHINE)
    (move,) = partitioner.reshard(Tensor("rows", "EGC"), "GEC", 2)
    assert (move.kind, move.axis, move.size) == ("all-to-all", 0, 64 * 16 * 32 * 2 / 4)


def test_what_nobody_divides_is_repeated():
    """Along y all eight devices compute the same; the time is eight times that where they divide C."""
    division = divide("AB", "BC", "AC", AB=(0, -1), AC=(0, -1))
    whole = divide("AB", "BC", "AC", AB=(0, -1), BC=(-1, 1), AC=(0, 1))
    assert division.seconds == pytest.approx(8 * whole.seconds)


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        ((8, 4), [("all-gather", 1, 8192 * 2048 * 4 / 8), ("all-to-all", 0, 65536 * 2048 * 4 / 8)]),
        ((4, 8), [("all-gather", 0, 8192 * 2048 * 4 / 8), ("reduce-scatter", 1, 65536 * 2048 * 4 / 32)]),
    ],
)
def test_a_lookup_keeps_its_table_sharded_along_the_larger_axis(mesh, expected):
    """XLA gathers the other; M on the larger axis moves with an AllToAll of the vectors, V leaves terms of a sum.

    The batch and M of the table are on x, V of the table and M of the vectors on y, as in GSPMD's 2-D layouts.
    """
    machine = Machine(mesh, _MACHINE.links, _MACHINE.flops, _MACHINE.memory_bandwidth)
    shardings = {"AV": (0, 1), "VM": (1, 0), "AM": (0, 1)}
    lookup = Product(Tensor("ids", "AV"), Tensor("table", "VM", 1, True), Tensor("vectors", "AM"), 4, 4, is_lookup=True)
    found = Partitioner(shardings, {"A": 65536, "V": 8192, "M": 2048}, machine).divide(lookup)
    assert moves(found) == expected
