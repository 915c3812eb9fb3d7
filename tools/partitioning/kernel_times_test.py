"""Protects the table of kernels: what is one line, what is summed, and the errors."""

from __future__ import annotations

import dataclasses

import pytest

from lingvo_moe.analysis.hardware import GENERATIONS
from lingvo_moe.analysis.hlo import Module
from lingvo_moe.cli import app
from lingvo_moe.engines.topology import Slice
from lingvo_moe.errors import UserError
from tools.partitioning import kernel_times

_V3 = GENERATIONS["v3"]
# 940 cycles are a microsecond, and so are the 450 kB that a copy moves; the product has 2 * 256^3 operations.
_HLO = """HloModule jit_step, is_scheduled=true

ENTRY %main (a: f32[56250], b: f32[256,256]) -> f32[56250] {
  %a = f32[56250]{0} parameter(0)
  %b = f32[256,256]{1,0} parameter(1)
  %copy.1 = f32[56250]{0} copy(%a), metadata={op_name="call/while_1/Add"}, backend_config={"estimated_cycles":"940"}
  %copy.2 = f32[56250]{0} copy(%a), metadata={op_name="call/while_2/Add"}, backend_config={"estimated_cycles":"1880"}
  %dot.1 = f32[256,256]{1,0} dot(%b, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
metadata={op_name="call/self_attention/einsum/Einsum"}, backend_config={"estimated_cycles":"4700"}
  %sent = f32[56250]{0} copy(%a), metadata={op_name="call/gating/Cast"}
  ROOT %copy.3 = f32[56250]{0} copy(%a), metadata={op_name="call/gating/Max"}, \
backend_config={"estimated_cycles":"940"}
}
"""


def kernels() -> list[kernel_times.Kernels]:
    return kernel_times.read(Module(_HLO, 8), _V3)


def test_kernels_of_one_operation_are_one_line():
    """Two layers' additions are summed; what has no estimate is left out; the longest is first."""
    product, added, routed = kernels()
    flops = 2 * 256**3
    assert product.part == "self_attention" and product.seconds == pytest.approx(5e-6)
    assert product.products == pytest.approx(flops / _V3.peak_flops) and product.roofline >= product.products
    assert (added.part, added.runs) == ("other", 2) and added.operation == "copy call/while/Add"
    assert added.seconds == pytest.approx(3e-6) and added.roofline == pytest.approx(2e-6) and added.products == 0
    assert (routed.part, routed.runs, routed.result) == ("gating", 1, "f32[56250]")


def test_the_report_sums_parts_and_lists_kernels():
    """The first table has all parts; `part` and `count` choose kernels."""
    text = kernel_times.report(kernels(), "other", 5)
    parts, listed = (table.splitlines()[1:] for table in text.split("\n\n"))
    assert [line.split()[-1] for line in parts] == ["self_attention", "other", "gating", "all"]
    assert parts[-1].split()[0] == "0.01" and len(listed) == 1 and "call/while/Add" in listed[0]
    assert len(kernel_times.report(kernels(), "", 2).split("\n\n")[1].splitlines()) == 3
    with pytest.raises(UserError, match="--part=experts: the step has no such part; it has gating, other, self_att"):
        kernel_times.report(kernels(), "experts", 5)


def test_a_tpu_without_a_clock_is_refused():
    with pytest.raises(UserError, match="no published clock"):
        kernel_times.read(Module(_HLO, 8), dataclasses.replace(_V3, clock=None))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--topology=v3:2x2x1"], "v3:2x2x1 has 8 cores; the mesh is 128, of 128. Pass --set=mesh=8, or a slice"),
        (
            ["--set=mesh=4"],
            "no TPU v3 slice of 4 cores, which come in hosts of 8, up to 2048; pass --topology, for inst",
        ),
        (["--set=mesh=4"], "or --set=mesh=N with a multiple of 8."),
        (["--set=mesh=3"], "Use --set=mesh with a divisor of"),
        (["--part=expert"], "--part=expert: no such part of a model. Did you mean experts"),
        (["--topology=tpu7x:4x4x4"], "this TPU has no published clock"),
    ],
)
def test_mistakes_are_reported_before_compiling(arguments, message, monkeypatch, capsys):
    """With remedies that the tool has: its mesh is set by --set alone."""
    monkeypatch.setattr(Slice, "compile", None)
    arguments = ["kernel_times", "--model=m4.MoE128E12L", *arguments]
    assert app.execute(kernel_times.main, arguments, kernel_times._VALUES) == 2
    assert message in capsys.readouterr().err
