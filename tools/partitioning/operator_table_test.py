"""Tests that the partitioner has the complexities of GShard table 4."""

from __future__ import annotations

import pytest

from lingvo_moe.cli import app
from tools.partitioning import operator_table
from tools.partitioning.operator_table import OPERATORS, measure

_KINDS = {
    "none": set(),
    "AllReduce O(1)": {"all-reduce"},
    "AllToAll O(sqrt D)": {"all-to-all"},
    # The TPU's compiler may write a gather as the sum of parts that are zero elsewhere.
    "AllGather or CollectivePermute O(D)": {"all-gather", "collective-permute", "all-reduce"},
    "CollectivePermute (halo) O(1)": {"collective-permute"},
}


@pytest.mark.parametrize("operator", OPERATORS, ids=[f"{o.name} {o.sharded}" for o in OPERATORS])
def test_compute_and_communication_grow_as_in_the_table(operator):
    """From 8 to 64 devices O(1) stays constant and O(D) grows eightfold; the collectives are those of the table."""
    few, many = (measure(operator, devices) for devices in (8, 64))
    growth = 8 if operator.paper_compute == "O(D)" else 1
    assert many.flops == pytest.approx(growth * few.flops, rel=0.05)
    for found in (few, many):
        assert {kind for kind, _ in found.collectives} <= _KINDS[operator.paper_communication]
        assert bool(found.collectives) == (operator.paper_communication != "none")
    sent = [sum(size for _, size in found.collectives) for found in (few, many)]
    # The bytes that a device sends in an AllToAll are O(1), too; its time is not.
    grows = operator.paper_communication.endswith("O(D)")
    assert sent[1] == pytest.approx((8 if grows else 1) * sent[0], rel=0.05)


def test_table_has_the_papers_rows():
    """Protects against a missing row."""
    assert [(o.name.partition("(")[0], o.sharded) for o in OPERATORS] == [
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
    "arguments, message",
    [
        (["--devices=8,many"], "expected numbers of TPU v3 cores"),
        (["--devices=8,,64"], "--devices=8,,64: expected numbers of TPU v3 cores"),
        (
            ["--devices=8,12"],
            "no TPU v3 slice of 12 cores, which come in hosts of 8, up to 2048; --devices=8,12 must be",
        ),
        (["--devices=0"], "--devices=0 must be multiples of 8"),
        (["--devices=4096"], "--devices=4096 must be multiples of 8"),
        (["stray"], "unexpected argument 'stray'"),
    ],
)
def test_invalid_flags(arguments, message, capsys):
    """Each is an error of one line before anything is compiled."""
    assert app.execute(operator_table.main, ["operator_table", *arguments], operator_table._VALUES) == 2
    printed = capsys.readouterr()
    assert message in printed.err and not printed.out
