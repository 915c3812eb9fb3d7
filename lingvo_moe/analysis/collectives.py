"""The collectives of a compiled module, wherever they are: in loops, branches and calls, and inside fusions.

The TPU's compiler writes a ReduceScatter as a fusion of an all-reduce and the slice that each device keeps. An
asynchronous collective of newer generations is split over several fusions, with computation between them; its parts
have the same channel.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

from lingvo_moe.analysis.hlo import Instruction, Module, array_bytes

COLLECTIVES = (
    "all-reduce",
    "all-to-all",
    "all-gather",
    "reduce-scatter",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)
# Inside a fusion, what may stand between an all-reduce and the slice of it that a device keeps.
_SAME_ELEMENTS = ("bitcast", "copy", "convert", "get-tuple-element", "reshape", "transpose")
# A plain search of the text, to check the reading: any line that runs a collective, but not the end of one.
_ANY = re.compile(
    r"^ *(?:ROOT )?%?([\w.\-]+) = .*?[\])}] "
    r"(?:all-\w[\w-]*|reduce-scatter[\w-]*|collective-[\w-]+|ragged-[\w-]+|send|recv)(?<!-done)\(",
    re.MULTILINE,
)
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective: communication between groups of devices.

    Attributes:
      channel: its number in the module's text, which all parts of an asynchronous collective have; the name of the
        instruction if it has none.
      kind: one of COLLECTIVES.
      bytes: of the result on each device, for one run; for an `all-reduce`, also of each device's operand.
      group_size: the number of devices that communicate with each other.
      stride: the difference between the numbers of neighbours in a group.
      times: the number of runs.
      op_name: the operation that it comes from.
    """

    channel: str
    kind: str
    bytes: int
    group_size: int
    stride: int
    times: int
    op_name: str


def find_collectives(module: Module) -> list[Collective]:
    """Returns all collectives that a module runs, in its order."""
    found, fused = [], set()
    for outer, times in module.runs():
        for instruction, kept in _within(module, outer):
            collective = _collective(module, outer, instruction, kept, times)
            if instruction is outer or collective not in fused:
                found.append(collective)
            if instruction is not outer:
                fused.add(collective)
    return found


def missed(text: str, module: Module) -> list[str]:
    """Returns the names of collectives in the text of a module that `find_collectives` does not read: should be none.

    The names come from a plain search of the text.
    """
    read = {instruction.name for outer, _ in module.runs() for instruction, _ in _within(module, outer)}
    return [name for name in _ANY.findall(text) if name not in read]


def _within(module: Module, instruction: Instruction) -> Iterator[tuple[Instruction, int]]:
    """Yields (collective, bytes of the slices of its result that are kept or 0) of an instruction and what it fuses."""
    if _kind(instruction):
        yield instruction, 0
    elif not module.executes_called(instruction):  # else they are in `module.runs` themselves
        for name in module.called(instruction):
            for inner in module.computations[name]:
                if _kind(inner) == "all-reduce":
                    yield inner, _kept_bytes(module.computations[name], inner)
                else:
                    yield from _within(module, inner)


def _collective(module: Module, outer: Instruction, instruction: Instruction, kept: int, times: int) -> Collective:
    channel = _CHANNEL.search(instruction.rest)
    return Collective(
        channel[1] if channel else instruction.name,
        "reduce-scatter" if kept else _kind(instruction),
        kept or _result_bytes(instruction),
        *_group(instruction, module.num_devices),
        times,
        instruction.op_name or outer.op_name,
    )


def _kind(instruction: Instruction) -> str:
    """Returns the kind of a collective; empty for another instruction and for the end of an asynchronous one."""
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in COLLECTIVES else ""


def _result_bytes(instruction: Instruction) -> int:
    """Returns the bytes of the result; the start of an asynchronous collective has a tuple (operands, results, ...)."""
    if instruction.opcode.endswith("-start") and _kind(instruction) != "all-reduce":
        return array_bytes(_elements(instruction.result)[1])
    return instruction.result_bytes


def _elements(result: str) -> list[str]:
    """Returns the texts of the elements of a tuple's type."""
    elements, depth = [""], 0
    for character in result[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            elements.append("")
        else:
            elements[-1] += character
    return elements


def _kept_bytes(computation: list[Instruction], reduced: Instruction) -> int:
    """Returns the bytes of the slices of an all-reduce's results that a device keeps; 0 if it keeps all of them."""
    same, kept = {reduced.name}, 0
    for instruction in computation:
        if instruction.operands and instruction.operands[0] in same:
            if instruction.opcode == "dynamic-slice":
                kept += instruction.result_bytes
            elif instruction.opcode in _SAME_ELEMENTS:
                same.add(instruction.name)
    return kept


def _group(instruction: Instruction, num_devices: int) -> tuple[int, int]:
    """Returns (size, stride) of the groups; XLA writes mesh axes, a transposed iota, or lists."""
    if axes := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", instruction.rest):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", axes[1])}
        used = re.findall(r"'(\w+)'", axes[2])
        minor = list(sizes)[list(sizes).index(used[-1]) + 1 :]
        return math.prod(sizes[name] for name in used), math.prod(sizes[name] for name in minor)
    if count := re.search(r"replica_groups=\[\d+,(\d+)\]<=\[([\d,]+)\](T)?", instruction.rest):
        return int(count[1]), int(count[2].split(",")[-1]) if count[3] else 1
    if first := re.search(r"replica_groups=\{\{([\d,]+)\}", instruction.rest):
        members = list(map(int, first[1].split(",")))
        return len(members), members[1] - members[0] if len(members) > 1 else 1
    return num_devices, 1
