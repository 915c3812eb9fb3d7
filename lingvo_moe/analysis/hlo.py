"""Parses the text (HLO) of a compiled, partitioned XLA module; counts how often instructions run, and their cycles.

XLA's own cost analysis counts the body of a loop once; here every instruction has the number of times that it runs.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from lingvo_moe.analysis.instruction import ARRAY, Instruction, bytes_of, instruction_of
from lingvo_moe.analysis.trip_counts import TripCounts

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
# Instructions whose results are inputs or other instructions' results.
WITHOUT_BUFFER = ("parameter", "get-tuple-element", "tuple", "while", "call", "conditional", "bitcast", "opt-barrier")
# Instructions that execute the instructions of the computations that they call.
_EXECUTED = ("while", "call", "conditional", "async-start")


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A result of the module's instructions.

    Attributes:
      bytes: on each device.
      shape: as in the module, `f32[128,4096,1024]`.
      op_name: the operation that it comes from.
    """

    bytes: int
    shape: str
    op_name: str


class Module:
    """A parsed module.

    Attributes:
      computations: instructions by the name of their computation.
      entry: the name of the computation that runs first.
      num_devices: that the module is partitioned for.
      unknown_loops: the number of loops whose trip count depends on data; they are counted as one trip.
    """

    def __init__(self, text: str, num_devices: int):
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        self.num_devices = num_devices
        current: list[Instruction] = []
        for line in text.splitlines():
            if not line.startswith(" ") and (header := _COMPUTATION.match(line)):
                current = self.computations.setdefault(header[2], [])
                self.entry = header[2] if header[1] else self.entry
            elif instruction := instruction_of(line):
                current.append(instruction)
        if not self.entry:
            raise ValueError("no entry computation; expected the text of a compiled XLA module")
        self._named = {i.name: i for instructions in self.computations.values() for i in instructions}
        self._computations_of = {i.name: name for name, instructions in self.computations.items() for i in instructions}
        self._trip_counts = TripCounts(self.computations)
        self._runs = list(self._walk(self.entry, 1))
        self.unknown_loops = sum(
            1
            for instruction, _ in self._runs
            if instruction.opcode == "while" and self._trip_counts.of(instruction) is None
        )

    def runs(self) -> list[tuple[Instruction, int]]:
        """Returns every instruction that the device executes, and how often it runs.

        A fusion is one instruction. Every branch of a conditional counts as if it were always taken.
        """
        return self._runs

    def called(self, instruction: Instruction) -> list[str]:
        """Returns the names of the computations that an instruction calls."""
        return [name for name in instruction.references if name in self.computations]

    def computation_of(self, instruction: Instruction) -> str:
        """Returns the name of the computation that an instruction is in."""
        return self._computations_of[instruction.name]

    def executes_called(self, instruction: Instruction) -> bool:
        """Returns whether `runs` lists the instructions that it calls (of a call), and not it alone (of a fusion)."""
        return instruction.opcode in _EXECUTED

    def named(self, name: str) -> Instruction:
        """Returns the instruction of a name."""
        return self._named[name]

    def largest_buffers(self, count: int) -> list[Buffer]:
        """Returns the largest single results, one per operation, without inputs and pointers to other results.

        Raises:
          ValueError: an unknown element type.
        """
        largest: dict[str, Buffer] = {}
        for instruction, _ in self._runs:
            if instruction.opcode not in WITHOUT_BUFFER:
                for dtype, sizes in ARRAY.findall(instruction.result):
                    buffer = Buffer(bytes_of(dtype, sizes), f"{dtype}[{sizes}]", instruction.op_name)
                    largest[buffer.op_name] = max(largest.get(buffer.op_name, buffer), buffer, key=lambda b: b.bytes)
        return sorted(largest.values(), key=lambda buffer: -buffer.bytes)[:count]

    def _walk(self, computation: str, times: int) -> Iterator[tuple[Instruction, int]]:
        for instruction in self.computations[computation]:
            yield instruction, times
            if instruction.opcode == "while":
                trips = self._trip_counts.of(instruction)
                trips = 1 if trips is None else trips
                yield from self._walk(instruction.computation("condition"), times * (trips + 1))
                yield from self._walk(instruction.computation("body"), times * trips)
            elif self.executes_called(instruction):
                for called in self.called(instruction):
                    yield from self._walk(called, times)
