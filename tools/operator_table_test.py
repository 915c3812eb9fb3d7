"""The partitioner keeps every claim of GShard table 4: what is O(1) stays as devices grow, what is O(D) grows with them."""

from __future__ import annotations

import pytest

from tools import operator_table
from tools.operator_table import OPERATORS, measure

_KINDS = {
    "none": set(),
    "AllReduce O(1)": {"all-reduce"},
    "AllToAll O(sqrt D)": {"all-to-all"},
    # The TPU's compiler may write a gather as the sum of parts that are zero elsewhere.
    "AllGather or CollectivePermute O(D)": {"all-gather", "collective-permute", "all-reduce"},
    "CollectivePermute (halo) O(1)": {"collective-permute"},
}


@pytest.mark.parametrize("operator", OPERATORS, ids=[f"{o.name} {o.cut}" for o in OPERATORS])
def test_compute_and_exchanges_grow_as_the_table_says(operator):
    few, many = (measure(operator, devices) for devices in (8, 64))
    growth = 8 if operator.paper_compute == "O(D)" else 1
    assert many.flops == pytest.approx(growth * few.flops, rel=0.05)
    for found in (few, many):
        assert {kind for kind, _ in found.collectives} <= _KINDS[operator.paper_communication]
        assert bool(found.collectives) == (operator.paper_communication != "none")
    sent = [sum(size for _, size in found.collectives) for found in (few, many)]
    # What each device exchanges of an AllToAll is O(1), too; its time is not.
    grows = operator.paper_communication.endswith("O(D)")
    assert sent[1] == pytest.approx((8 if grows else 1) * sent[0], rel=0.05)


def test_the_table_has_the_papers_rows():
    assert [(o.name.partition("(")[0], o.cut) for o in OPERATORS] == [
        ("Add", "A"),
        ("Matmul", "B"),
        ("Matmul", "A"),
        ("Matmul", "AB"),
        ("Matmul", "AC"),
        ("Reduce", "A"),
        ("Reduce", "A"),
        ("Einsum", "GE"),
        ("Convolution", "X"),
    ]


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--devices=8,many"], "expected numbers of TPU v3 cores"),
        (["--devices=12"], "no TPU v3 slice of 12 cores"),
        (["stray"], "'stray' is not"),
    ],
)
def test_mistakes_are_told(arguments, said, capsys):
    from lingvo_moe.cli import app

    try:
        assert app.execute(operator_table.main, ["operator_table", *arguments], operator_table._VALUES) == 2
    finally:
        operator_table._VALUES["devices"].value = ["8", "64", "512"]
    assert said in capsys.readouterr().err
