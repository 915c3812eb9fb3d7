"""The collectives of a compiled module, wherever they are: in loops, branches and calls, and inside fusions.

The TPU's compiler writes a ReduceScatter as a fusion of an all-reduce and the slice that each device keeps. An
asynchronous collective of newer generations is split over several fusions, with computation between them; the compiler
writes one `chain_id` to all of its parts, and to no other collective.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import numpy as np

from lingvo_moe.analysis.hardware import Network, Torus
from lingvo_moe.analysis.hlo import Module
from lingvo_moe.analysis.instruction import SAME_ELEMENTS, Instruction, array_bytes

COLLECTIVES = (
    "all-reduce",
    "all-to-all",
    "all-gather",
    "reduce-scatter",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)
# The computation that they call ran from its start on.
_ENDS = ("async-update", "async-done")
# Inside a fusion, what may stand between an all-reduce of one or more arrays and the slice of it that a device keeps.
_BEFORE_SLICE = (*SAME_ELEMENTS, "get-tuple-element")
# A plain search of the text, to check the reading: any line that runs a collective, but not the end of one.
_ANY = re.compile(
    r"^ *(?:ROOT )?%?([\w.\-]+) = .*?[\])}] "
    r"(?:all-\w[\w-]*|reduce-scatter[\w-]*|collective-[\w-]+|ragged-[\w-]+|send|recv)(?<!-done)\(",
    re.MULTILINE,
)
# Devices in the order of a transposed iota.
_IOTA = r"\[[\d,]+\](?:T\([\d,]+\))?"
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
_CHAIN = re.compile(r'\bchain_id="(\d+)"')


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective: communication between groups of devices.

    Attributes:
      channel: its channel number, shared by the parts of an asynchronous collective (and sometimes by unrelated ones);
        the instruction's name if it has none.
      kind: one of COLLECTIVES.
      bytes: of the result on each device, for one run; for an `all-reduce`, also of each device's operand.
      group: the numbers of the devices of one group, which communicate with each other, in ascending order; all devices
        for a `collective-permute`.
      times: the number of runs.
      op_name: the operation that it comes from.
      overlapped_cycles: the TPU compiler's estimate of what the core computes in one run between the start of an
        asynchronous collective and its end, without loops; 0 for another one.
      pairs: the (source, target) devices of a `collective-permute`.
    """

    channel: str
    kind: str
    bytes: int
    group: tuple[int, ...]
    times: int
    op_name: str
    overlapped_cycles: int = 0
    pairs: tuple[tuple[int, int], ...] = ()

    @property
    def group_size(self) -> int:
        """The number of devices that communicate with each other."""
        return len(self.group)

    def seconds(self, links: Torus | Network) -> float:
        """Returns the seconds of one run by our model of the links."""
        if self.kind == "collective-permute":
            return links.permute_seconds(self.bytes, self.pairs)
        return links.seconds(self.kind, self.bytes, self.group)


def find_collectives(module: Module) -> list[Collective]:
    """Returns all collectives that a module runs, in its order; raises ValueError for groups that it cannot read.

    Of a collective that is split over fusions, the first part counts, each time that it runs. Parts are known by their
    chain alone: unrelated collectives of one channel, kind and size all count.
    """
    found, first_parts = [], {}
    for outer, times in module.runs():
        for instruction, kept in _within(module, outer):
            collective = _collective(module, outer, instruction, kept, times)
            chain = _CHAIN.search(instruction.rest)
            # A copy of a loop's body may keep the numbers of its chains, but runs by itself.
            key = (module.computation_of(outer), collective.channel, collective.kind, chain and chain[1])
            if chain is None or first_parts.setdefault(key, outer.name) == outer.name:
                found.append(collective)
    return found


def missed(text: str, module: Module) -> list[str]:
    """Returns the names of collectives that a plain search of the text finds and `find_collectives` does not read."""
    read = {instruction.name for outer, _ in module.runs() for instruction, _ in _within(module, outer)}
    return [name for name in _ANY.findall(text) if name not in read]


def _within(module: Module, instruction: Instruction) -> Iterator[tuple[Instruction, int]]:
    """Yields (collective, bytes of the slices of its result that are kept or 0) of an instruction and what it fuses."""
    if _kind(instruction):
        yield instruction, 0
    elif not module.executes_called(instruction) and instruction.opcode not in _ENDS:
        for name in module.called(instruction):
            for inner in module.computations[name]:
                if _kind(inner) == "all-reduce":
                    yield inner, _kept_bytes(module.computations[name], inner)
                else:
                    yield from _within(module, inner)


def _collective(module: Module, outer: Instruction, instruction: Instruction, kept: int, times: int) -> Collective:
    channel = _CHANNEL.search(instruction.rest)
    return Collective(
        channel=channel[1] if channel else instruction.name,
        kind="reduce-scatter" if kept else _kind(instruction),
        bytes=kept or _result_bytes(instruction),
        group=tuple(np.sort(_first_group(instruction, module.num_devices)).tolist()),
        times=times,
        op_name=instruction.op_name or outer.op_name,
        overlapped_cycles=_overlapped_cycles(module, instruction),
        pairs=_pairs(instruction),
    )


def _overlapped_cycles(module: Module, start: Instruction) -> int:
    """Returns the cycles of the instructions between the start of a collective and its end, as they are scheduled."""
    if not start.opcode.endswith("-start"):
        return 0
    scheduled = module.computations[module.computation_of(start)]
    cycles = 0
    for instruction in scheduled[scheduled.index(start) + 1 :]:
        if start.name in instruction.operands and instruction.opcode.endswith("-done"):
            return cycles
        cycles += instruction.cycles
    return 0


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
        if same.isdisjoint(instruction.operands):
            continue
        if instruction.opcode == "dynamic-slice" and instruction.operands[0] in same:
            kept += instruction.result_bytes
        elif instruction.opcode in _BEFORE_SLICE and not instruction.is_root:
            same.add(instruction.name)
        else:
            return 0
    return kept


def _pairs(instruction: Instruction) -> tuple[tuple[int, int], ...]:
    """Returns the (source, target) devices of a permute; raises ValueError for one without them."""
    if _kind(instruction) != "collective-permute":
        return ()
    listed = re.search(r"\bsource_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", instruction.rest)
    if listed is None:
        raise ValueError(f"the pairs of {instruction.name} are not understood: {instruction.rest[:100]}")
    return tuple((int(source), int(target)) for source, target in re.findall(r"\{(\d+),(\d+)\}", listed[1]))


def _first_group(instruction: Instruction, num_devices: int) -> np.ndarray:
    """Returns the devices of one group; XLA writes axes of a mesh, a transposed iota, or lists."""
    groups = re.search(r"\breplica_groups=(.*)", instruction.rest)
    if groups is None or groups[1].startswith("{}"):
        return np.arange(num_devices)
    if mesh := re.match(rf"mesh\[([^\]]*)\](?:, device_ids=\(([\d,]+|{_IOTA})\))? \{{([^}}]*)\}}", groups[1]):
        return _group_of_mesh(*mesh.groups())
    if iota := re.match(rf"\[\d+,(\d+)\]<=({_IOTA})", groups[1]):
        return _devices(iota[2])[: int(iota[1])]
    if listed := re.match(r"\{\{([\d,]+)\}", groups[1]):
        return np.array(_numbers(listed[1]))
    raise ValueError(f"the replica groups of {instruction.name} are not understood: {groups[1][:100]}")


def _group_of_mesh(mesh: str, device_ids: str | None, axes: str) -> np.ndarray:
    """Returns one group along axes of a mesh; `'x':(2)4` is the part of size 4 of x that comes after one of size 2."""
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh)}
    splits, used = {name: [size] for name, size in sizes.items()}, []
    for name, before, size in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", axes):
        if size:
            splits[name] = [int(before), int(size), sizes[name] // int(before) // int(size)]
        used.append((name, 1 if size else 0))
    dimensions = [(name, part) for name, parts in splits.items() for part in range(len(parts))]
    shape = [size for parts in splits.values() for size in parts]
    devices = _devices(device_ids) if device_ids else np.arange(np.prod(shape))
    last = [dimensions.index(axis) for axis in used]
    rest = [index for index in range(len(dimensions)) if index not in last]
    return devices.reshape(shape).transpose(rest + last).reshape(-1, np.prod([shape[index] for index in last]))[0]


def _devices(text: str) -> np.ndarray:
    """Returns the devices of a list, or of `[sizes]T(axes)`: all in order, shaped, transposed and made flat again."""
    if not text.startswith("["):
        return np.array(_numbers(text))
    sizes, _, axes = text.removeprefix("[").removesuffix(")").partition("]")
    shape = _numbers(sizes)
    devices = np.arange(np.prod(shape)).reshape(shape)
    return devices.transpose(_numbers(axes.removeprefix("T("))).flatten() if axes else devices.flatten()


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]
