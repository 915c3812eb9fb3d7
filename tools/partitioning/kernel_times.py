"""Lists the kernels of a training step, compiled for a TPU slice, by their time, beside the roofline of each.

    python -m tools.partitioning.kernel_times --model=m4.MoE128E12L [--set=FIELD=VALUE] [--topology=v3:8x8x1]
      [--part=other]

Times are the compiler's cycles over the clock. The roofline of a kernel is the longer of its matrix products at the
peak and its operands and results at the memory's bandwidth; `products` has the former alone. Kernels of one operation
and form are one line. Compiling takes as long as for `plan`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence

from absl import flags

from lingvo_moe import experiment
from lingvo_moe.analysis import plan, roofline
from lingvo_moe.analysis.hardware import GENERATIONS, Generation
from lingvo_moe.analysis.hlo import Module
from lingvo_moe.analysis.instruction import Instruction
from lingvo_moe.cli import app
from lingvo_moe.engines.topology import Slice, v3_slice
from lingvo_moe.errors import UserError, did_you_mean

_VALUES = flags.FlagValues()
flags.DEFINE_string("model", "m4.MoE128E12L", "the registered model", flag_values=_VALUES)
flags.DEFINE_multi_string("set", [], "override FIELD=VALUE", flag_values=_VALUES)
flags.DEFINE_string("topology", None, "the TPU slice; default: TPU v3 for the model's mesh", flag_values=_VALUES)
flags.DEFINE_string("part", "", "list the kernels of this part of the model alone", flag_values=_VALUES)
flags.DEFINE_integer("count", 40, "how many kernels to list", lower_bound=1, flag_values=_VALUES)
_NUMBERS = re.compile(r"_\d+|\.\d+")  # of a layer, a loop or an instruction
_LAYOUT = re.compile(r"\{[^}]*\}")
_MESH_FLAG = "--set=mesh"
_SHOWN = 4  # name scopes of an operation, the innermost ones


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The kernels of one operation and form: how often they run, and seconds of all runs together.

    Attributes:
      part: of the model, see `plan.PARTS`.
      operation: the instruction's opcode, and the TensorFlow operation with its inner scopes, without numbers.
      result: the shape of a result.
      runs: of all of them in a step.
      seconds: by the compiler's cycles.
      roofline, products: see the module.
    """

    part: str
    operation: str
    result: str
    runs: int
    seconds: float
    roofline: float
    products: float


def read(module: Module, generation: Generation) -> list[Kernels]:
    """Returns the kernels of a module, the longest first; raises UserError for a TPU without a published clock."""
    clock = clock_of(generation)
    found: dict[tuple, Kernels] = {}
    for instruction, times in module.runs():
        if instruction.cycles:
            made = Kernels(
                plan.part_of(instruction),
                _operation(instruction),
                _LAYOUT.sub("", instruction.result),
                times,
                times * instruction.cycles / clock,
                times * roofline.seconds(module, instruction, generation),
                times * roofline.product_seconds(module, instruction, generation),
            )
            key = (made.part, made.operation, made.result)
            found[key] = _sum(made.operation, made.result, [found[key], made]) if key in found else made
    return sorted(found.values(), key=lambda kernels: -kernels.seconds)


def clock_of(generation: Generation) -> float:
    """Returns the Hz of a core; raises UserError if they are not published."""
    if not generation.clock:
        raise UserError("this TPU has no published clock, so its kernels have no times; choose another --topology.")
    return generation.clock


def report(kernels: Sequence[Kernels], part: str, count: int) -> str:
    """Returns the times by part of the model, then those of the longest kernels, as text."""
    parts = {one.part: [other for other in kernels if other.part == one.part] for one in kernels}
    if part and part not in parts:
        raise UserError(f"--part={part}: the step has no such part; it has {', '.join(sorted(parts))}.")
    sums = sorted((_sum("", "", members) for members in parts.values()), key=lambda one: -one.seconds)
    listed = [one for one in kernels if part in ("", one.part)][:count]
    head = f"{'ms':>9}{'roofline':>10}{'products':>10}{'runs':>7}  "
    lines = [f"{head}part", *map(_line, sums), _line(dataclasses.replace(_sum("", "", kernels), part="all"))]
    return "\n".join([*lines, "", f"{head}{'part':16}operation", *map(_line, listed)])


def _sum(operation: str, result: str, members: Iterable[Kernels]) -> Kernels:
    members = list(members)
    fields = ("runs", "seconds", "roofline", "products")
    return Kernels(
        members[0].part, operation, result, *(sum(getattr(one, field) for one in members) for field in fields)
    )


def _operation(instruction: Instruction) -> str:
    scopes = _NUMBERS.sub("", instruction.op_name).split("/")
    return f"{instruction.opcode} {'/'.join(scopes[-_SHOWN:])}".rstrip()


def _line(kernels: Kernels) -> str:
    times = (kernels.seconds, kernels.roofline, kernels.products)
    figures = "".join(f"{1e3 * seconds:{width}.2f}" for seconds, width in zip(times, (9, 10, 10)))
    return f"{figures}{kernels.runs:7}  {kernels.part:16}{kernels.operation} {kernels.result}".rstrip()


def main(arguments: list[str]):
    """Compiles and prints."""
    app.no_arguments(arguments[1:])
    if _VALUES.part and _VALUES.part not in plan.ALL_PARTS:
        raise UserError(
            f"--part={_VALUES.part}: no such part of a model.{did_you_mean(_VALUES.part, plan.ALL_PARTS)} Known: "
            f"{', '.join(plan.ALL_PARTS)}."
        )
    config = experiment.get(_VALUES.model, _VALUES.set, device_flags=_MESH_FLAG)
    remedy = f"pass --topology, for instance v3:8x8x1, or {_MESH_FLAG}=N with a multiple of 8"
    target = Slice.of(_VALUES.topology or v3_slice(config.mesh.size, remedy))
    target.check(config.mesh, _MESH_FLAG)
    clock_of(GENERATIONS[target.generation])  # reports a mistake before compiling
    compiled = target.compile(config.steps.train(config.batch_specs()))
    kernels = read(Module(compiled.hlo(), config.mesh.size), GENERATIONS[target.generation])
    print(report(kernels, _VALUES.part, _VALUES.count))


if __name__ == "__main__":
    app.run(main, _VALUES)
