"""GShard table 4 with the real partitioner: what each operator computes and exchanges as the devices grow.

    python -m tools.operator_table [--devices=8,64,512]

Every row is annotated as the table says, compiled for TPU v3 slices with libtpu, and read: floating-point operations of one
device by the compiler's own count, exchanges from the partitioned module. Dimensions that the table calls O(D) grow with the
devices; where the paper says O(1), the figures must stay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from absl import flags

from lingvo_moe.analysis.hlo import Module
from lingvo_moe.cli import app
from lingvo_moe.engines.topology import Slice, v3_slice
from lingvo_moe.errors import UserError
from lingvo_moe.lazy import tf
from lingvo_moe.program import lower
from lingvo_moe.sharding.layout import AxisRule, DeviceMesh, Layout, Spec

_VALUES = flags.FlagValues()
flags.DEFINE_list("devices", ["8", "64", "512"], "numbers of TPU v3 cores", flag_values=_VALUES)


@dataclasses.dataclass(frozen=True)
class Operator:
    """A row of the table.

    Attributes:
      name: as the table writes it.
      cut: the dimensions that are O(D), each cut into D parts where it stands first among them in a tensor.
      inputs, output: dimensions of the tensors, in the table's letters.
      compute: the function of the inputs.
      paper_compute, paper_communication: what the table says.
      sizes: sizes of dimensions by letter, on one device for those that are cut; 64 where nothing is said.
      shrinking: dimensions that fall with the devices.
    """

    name: str
    cut: str
    inputs: tuple[str, ...]
    output: str
    compute: Callable
    paper_compute: str
    paper_communication: str
    sizes: tuple[tuple[str, int], ...] = ()
    shrinking: str = ""

    def size(self, letter: str, devices: int) -> int:
        """The size of a dimension on so many devices."""
        base = dict(self.sizes).get(letter, 64)
        if letter in self.shrinking:
            return max(1, base // devices)
        return base * devices if letter in self.cut else base


def _matmul(a, b):
    return tf.matmul(a, b)


def _convolution(image, kernel):
    return tf.nn.conv2d(image, kernel, strides=1, padding="SAME")


# The table's letters in ours, whose names mean nothing here: any letter can be claimed.
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
# An image is N (batch) X Y I; the table's C of the einsum, capacity, is K here, as C is a dimension of the matrices.
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
    """One operator on so many devices: operations of one device, and (kind, bytes) of what it exchanges."""

    devices: int
    flops: float
    collectives: tuple[tuple[str, int], ...]


def measure(operator: Operator, devices: int) -> Measured:
    """Compiles an operator for a TPU v3 slice of `devices` cores and reads the partitioned module."""
    layout = Layout(
        DeviceMesh((devices,)), (AxisRule("".join(_LOGICAL_AXES[letter] for letter in operator.cut), ("x",)),)
    )

    def logical_axes(dimensions: str) -> str:
        return "".join(_LOGICAL_AXES[letter] for letter in dimensions)

    def shape(dimensions: str) -> tuple[int, ...]:
        return tuple(operator.size(letter, devices) for letter in dimensions)

    def function(inputs: dict) -> dict:
        placed = [
            layout.annotate(inputs[str(i)], logical_axes(dimensions)) for i, dimensions in enumerate(operator.inputs)
        ]
        return {"output": layout.annotate(operator.compute(*placed), logical_axes(operator.output))}

    specs = {
        str(i): Spec(shape(dimensions), "float32", logical_axes(dimensions))
        for i, dimensions in enumerate(operator.inputs)
    }
    compiled = Slice.of(v3_slice(devices)).load(
        lower("operator", function, specs, {"output": logical_axes(operator.output)}, layout)
    )
    collectives = Module(compiled.hlo(), devices).collectives()
    return Measured(devices, compiled.flops(), tuple((c.kind, c.bytes * c.times) for c in collectives))


def main(arguments: list[str]):
    """Prints the table."""
    app.no_arguments(arguments[1:])
    if not all(text.isdecimal() for text in _VALUES.devices):
        raise UserError(
            f"--devices={','.join(_VALUES.devices)}: expected numbers of TPU v3 cores, for instance 8,64,512."
        )
    print(
        "| operator | O(D) | paper: compute, communication | devices | MFLOP a device | exchanged by a device |\n|---|---|---|---|---|---|"
    )
    for operator in OPERATORS:
        for devices in map(int, _VALUES.devices):
            found = measure(operator, devices)
            exchanged = ", ".join(f"{kind} {size / 1024:,.1f} KiB" for kind, size in found.collectives) or "none"
            print(
                f"| {operator.name} | {','.join(operator.cut)} | {operator.paper_compute}, {operator.paper_communication} | {devices} | "
                f"{found.flops / 1e6:,.3f} | {exchanged} |",
                flush=True,
            )


if __name__ == "__main__":
    app.run(main, _VALUES)
