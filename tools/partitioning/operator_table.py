"""GShard table 4 with the real partitioner: compute and communication of each operator as the devices grow.

    python -m tools.partitioning.operator_table [--devices=8,64,512]

Every row is annotated as in the table and compiled for TPU v3 slices with libtpu. The floating-point operations of one
device are the compiler's own count, the collectives are read from the partitioned module. Dimensions that the table
calls O(D) grow with the devices; where the paper says O(1), the figures must stay constant.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from absl import flags

from lingvo_moe.analysis.collectives import find_collectives
from lingvo_moe.analysis.hlo import Module
from lingvo_moe.cli import app
from lingvo_moe.engines.topology import Slice, v3_slice
from lingvo_moe.errors import UserError
from lingvo_moe.lazy import tf
from lingvo_moe.program import lower
from lingvo_moe.ranges import COUNT_OR_0
from lingvo_moe.sharding.layout import AxisRule, DeviceMesh, Layout, Spec
from lingvo_moe.utils import field_values

_VALUES = flags.FlagValues()
flags.DEFINE_list("devices", ["8", "64", "512"], "numbers of TPU v3 cores", flag_values=_VALUES)


@dataclasses.dataclass(frozen=True)
class Operator:
    """A row of the table.

    Attributes:
      name: the operator in the table's notation.
      sharded: the dimensions that are O(D); in each tensor, the first of them is split into D shards.
      inputs, output: dimensions of the tensors, in the table's letters.
      compute: the function of the inputs.
      paper_compute, paper_communication: the table's entries.
      sizes: sizes of dimensions by letter, per device for the sharded ones; the default is 64.
      shrinking: dimensions whose size is divided by the number of devices.
    """

    name: str
    sharded: str
    inputs: tuple[str, ...]
    output: str
    compute: Callable
    paper_compute: str
    paper_communication: str
    sizes: tuple[tuple[str, int], ...] = ()
    shrinking: str = ""

    def size(self, letter: str, devices: int) -> int:
        """Returns the size of a dimension for a number of devices."""
        base = dict(self.sizes).get(letter, 64)
        if letter in self.shrinking:
            return max(1, base // devices)
        return base * devices if letter in self.sharded else base


def _matmul(a, b):
    return tf.matmul(a, b)


def _convolution(image, kernel):
    return tf.nn.conv2d(image, kernel, strides=1, padding="SAME")


# The logical axes that stand for the table's letters; their usual meaning does not matter here.
_LOGICAL_AXES = {
    "A": "G",
    "B": "M",
    "C": "H",
    "G": "G",
    "S": "S",
    "E": "E",
    "M": "M",
    "X": "L",
    "Y": "T",
    "I": "N",
    "O": "D",
    "x": "r",
    "y": "v",
    "N": "B",
    "K": "C",
}
# An image is N (batch) X Y I. The einsum's C, capacity, is K here, as C is a dimension of the matrices.
OPERATORS = (
    Operator("Add(A,A->A)", "A", ("A", "A"), "A", lambda a, b: a + b, "O(1)", "none", (("A", 2**16),)),
    Operator("Matmul(AB,BC->AC)", "B", ("AB", "BC"), "AC", _matmul, "O(1)", "AllReduce O(1)"),
    Operator("Matmul(AB,BC->AC)", "A", ("AB", "BC"), "AC", _matmul, "O(1)", "none"),
    Operator("Matmul(AB,BC->AC)", "AB", ("AB", "BC"), "AC", _matmul, "O(D)", "AllGather or CollectivePermute O(D)"),
    Operator("Matmul(AB,BC->AC)", "AC", ("AB", "BC"), "AC", _matmul, "O(D)", "AllGather or CollectivePermute O(D)"),
    Operator("Reduce(AB->A)", "A", ("AB",), "A", lambda a: tf.reduce_sum(a, 1), "O(1)", "none"),
    Operator("Reduce(AB->B)", "A", ("AB",), "B", lambda a: tf.reduce_sum(a, 0), "O(1)", "AllReduce O(1)"),
    Operator(
        "Einsum(GSEC,GSM->EGCM)",
        "GE",
        ("GSEK", "GSM"),
        "EGKM",
        lambda a, b: tf.einsum("GSEC,GSM->EGCM", a, b),
        "O(1)",
        "AllToAll O(sqrt D)",
        (("G", 1), ("E", 1), ("S", 512), ("K", 512), ("M", 128)),
        "K",
    ),
    Operator(
        "Convolution(BIXY,xyIO->BOXY)",
        "X",
        ("NXYI", "xyIO"),
        "NXYO",
        _convolution,
        "O(1)",
        "CollectivePermute (halo) O(1)",
        (("N", 2), ("X", 16), ("Y", 64), ("I", 16), ("O", 16), ("x", 3), ("y", 3)),
    ),
)


@dataclasses.dataclass(frozen=True)
class Measured:
    """An operator on a number of devices: operations of one device, and (kind, bytes) of its collectives."""

    devices: int
    flops: float
    collectives: tuple[tuple[str, int], ...]


def measure(operator: Operator, devices: int) -> Measured:
    """Compiles an operator for a TPU v3 slice of `devices` cores and reads the partitioned module."""
    layout = Layout(
        DeviceMesh((devices,)), (AxisRule("".join(_LOGICAL_AXES[letter] for letter in operator.sharded), ("x",)),)
    )

    def logical_axes(dimensions: str) -> str:
        return "".join(_LOGICAL_AXES[letter] for letter in dimensions)

    def shape(dimensions: str) -> tuple[int, ...]:
        return tuple(operator.size(letter, devices) for letter in dimensions)

    def function(inputs: dict) -> dict:
        annotated = [
            layout.annotate(inputs[str(i)], logical_axes(dimensions)) for i, dimensions in enumerate(operator.inputs)
        ]
        return {"output": layout.annotate(operator.compute(*annotated), logical_axes(operator.output))}

    specs = {
        str(i): Spec(shape(dimensions), "float32", logical_axes(dimensions))
        for i, dimensions in enumerate(operator.inputs)
    }
    compiled = Slice.of(v3_slice(devices)).compile(
        lower("operator", function, specs, {"output": logical_axes(operator.output)}, layout)
    )
    collectives = find_collectives(Module(compiled.hlo(), devices))
    return Measured(devices, compiled.flops(), tuple((c.kind, c.bytes * c.times) for c in collectives))


def main(arguments: list[str]):
    """Prints the table."""
    app.no_arguments(arguments[1:])
    numbers = _numbers_of_devices()
    heads = (
        "operator",
        "O(D)",
        "paper: compute, communication",
        "devices",
        "MFLOP per device",
        "collectives of a device",
    )
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for operator in OPERATORS:
        for devices in numbers:
            found = measure(operator, devices)
            collectives = ", ".join(f"{kind} {size / 1024:,.1f} KiB" for kind, size in found.collectives) or "none"
            paper = f"{operator.paper_compute}, {operator.paper_communication}"
            cells = (operator.name, ",".join(operator.sharded), paper, str(devices), f"{found.flops / 1e6:,.3f}")
            print(f"| {' | '.join([*cells, collectives])} |", flush=True)


def _numbers_of_devices() -> list[int]:
    """Returns --devices; raises UserError for one of which there is no slice, before the first is compiled."""
    given = f"--devices={','.join(_VALUES.devices)}"
    found = [number for text in _VALUES.devices if (number := field_values.whole_number(text, COUNT_OR_0)) is not None]
    if not found or len(found) < len(_VALUES.devices):
        raise UserError(f"{given}: expected numbers of TPU v3 cores, for instance 8,64,512.")
    for number in found:
        v3_slice(number, f"{given} must be multiples of 8, for instance 8,64,512")
    return found


if __name__ == "__main__":
    app.run(main, _VALUES)
