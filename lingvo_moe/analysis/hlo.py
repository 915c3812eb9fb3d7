"""Parses the text (HLO) of a compiled, partitioned XLA module; counts how often instructions run, and their cycles.

XLA's own cost analysis counts the body of a loop once; here every instruction has the number of times that it runs.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^  (?:ROOT )?%?([\w.\-]+) = ")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_KNOWN_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CONTROL_PREDECESSORS = re.compile(r"control-predecessors=\{[^}]*\}")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "s16": 2,
    "u16": 2,
    "f16": 2,
    "bf16": 2,
    "s32": 4,
    "u32": 4,
    "f32": 4,
    "s64": 8,
    "u64": 8,
    "f64": 8,
    "c64": 8,
}
_WITHOUT_BUFFER = (
    "parameter",
    "get-tuple-element",
    "tuple",
    "while",
    "call",
    "conditional",
    "bitcast",
    "optimization-barrier",
)
# Instructions that execute the instructions of the computations that they call.
_EXECUTED = ("while", "call", "conditional", "async-start")
_MAX_TRIPS = 1_000_000


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: as in the text.
      opcode: as in the text.
      result: the text of the result's type.
      rest: the text after the opcode: operands and attributes.
      is_root: whether the computation returns it.
    """

    name: str
    opcode: str
    result: str
    rest: str
    is_root: bool

    @property
    def result_bytes(self) -> int:
        """Bytes of the result, of all elements of a tuple, without the padding of its layout."""
        return array_bytes(self.result)

    @property
    def cycles(self) -> int:
        """The TPU compiler's estimate of a core's cycles for one run; 0 if there is none (collectives, for example)."""
        match = _CYCLES.search(self.rest)
        return int(match[1]) if match else 0

    @property
    def op_name(self) -> str:
        """The TensorFlow operation that it comes from, with its name scopes; empty if the compiler added it."""
        match = _OP_NAME.search(self.rest)
        return match[1] if match else ""

    @property
    def operands(self) -> list[str]:
        """Names of the operands."""
        return re.findall(r"%([\w.\-]+)", self.rest[: _closing(self.rest, 0)])

    @property
    def index(self) -> int:
        """The index of a `get-tuple-element`."""
        return int(_match(r"index=(\d+)", self.rest)[1])

    @property
    def references(self) -> list[str]:
        """Names that the attributes refer to: the computations that it calls, whatever the attribute."""
        attributes = _CONTROL_PREDECESSORS.sub("", self.rest[_closing(self.rest, 0) :])
        return re.findall(r"%([\w.\-]+)", attributes)

    def computation(self, name: str) -> str:
        """Returns the computation that an attribute (`body`, `condition`, `calls`) names."""
        return _match(rf"\b{name}=%?([\w.\-]+)", self.rest)[1]


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
            elif match := _INSTRUCTION.match(line):
                current.append(_instruction(line, match))
        if not self.entry:
            raise ValueError("no entry computation; expected the text of a compiled XLA module")
        self._named = {i.name: i for instructions in self.computations.values() for i in instructions}
        self._computations_of = {i.name: name for name, instructions in self.computations.items() for i in instructions}
        self._runs = list(self._walk(self.entry, 1))
        self.unknown_loops = sum(
            1 for instruction, _ in self._runs if instruction.opcode == "while" and self._trips(instruction) is None
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
        """Returns the largest single results, one per operation, without inputs and pointers to other results."""
        largest: dict[str, Buffer] = {}
        for instruction, _ in self._runs:
            if instruction.opcode not in _WITHOUT_BUFFER:
                for dtype, sizes in _ARRAY.findall(instruction.result):
                    buffer = Buffer(_bytes(dtype, sizes), f"{dtype}[{sizes}]", instruction.op_name)
                    largest[buffer.op_name] = max(largest.get(buffer.op_name, buffer), buffer, key=lambda b: b.bytes)
        return sorted(largest.values(), key=lambda buffer: -buffer.bytes)[:count]

    def _walk(self, computation: str, times: int) -> Iterator[tuple[Instruction, int]]:
        for instruction in self.computations[computation]:
            yield instruction, times
            if instruction.opcode == "while":
                trips = self._trips(instruction)
                trips = 1 if trips is None else trips
                yield from self._walk(instruction.computation("condition"), times * (trips + 1))
                yield from self._walk(instruction.computation("body"), times * trips)
            elif self.executes_called(instruction):
                for called in self.called(instruction):
                    yield from self._walk(called, times)

    def _trips(self, loop: Instruction) -> int | None:
        if known := _KNOWN_TRIPS.search(loop.rest):
            return int(known[1])
        # The TPU compiler's text does not have the trip count.
        for trip in range(_MAX_TRIPS):
            value = self._condition(loop, loop.computation("condition"), trip)
            if not value:
                return trip if value is False else None
        return None

    def _condition(self, loop: Instruction, computation: str, trip: int, arguments: Sequence = ()) -> int | bool | None:
        """Evaluates a loop's condition before trip `trip`; None if it depends on data.

        The loop's counter is element 0 of its state and counts from 0: XLA normalises counters so. `arguments` are
        those of a fusion in the condition.
        """
        values: dict[str, int | bool | None] = {}
        for instruction in self.computations[computation]:
            operands = [values.get(name) for name in instruction.operands]
            if instruction.opcode == "parameter" and arguments:
                value = arguments[int(instruction.rest.partition(")")[0])]
            elif instruction.opcode == "fusion":
                value = self._condition(loop, instruction.computation("calls"), trip, operands)
            elif instruction.opcode == "get-tuple-element":
                value = trip if instruction.index == 0 else self._start(loop, instruction.index)
            else:
                value = _scalar(instruction, operands)
            values[instruction.name] = value
            if instruction.is_root:
                return value
        return None

    def _start(self, loop: Instruction, index: int) -> int | bool | None:
        """Returns the initial value of element `index` of a loop's state if the loop never changes it, else None.

        The limit of a gradient's loop is such a value: the trip count of the loop that it differentiates.
        """
        root = next(i for i in self.computations[loop.computation("body")] if i.is_root)
        passed, initial = (self._named[i.operands[index]] for i in (root, self._named[loop.operands[0]]))
        if passed.opcode != "get-tuple-element" or passed.index != index:
            return None
        while initial.opcode in ("copy", "bitcast"):
            initial = self._named[initial.operands[0]]
        if initial.opcode == "get-tuple-element" and initial.index == 0:
            producer = self._named[initial.operands[0]]
            return self._trips(producer) if producer.opcode == "while" else None
        return _scalar(initial, []) if initial.opcode == "constant" else None


def _match(pattern: str, text: str) -> re.Match[str]:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"{pattern!r} is not in the instruction's text {text[:200]!r}")
    return match


def array_bytes(text: str) -> int:
    """Returns the bytes of all arrays that the text of a type has, without the padding of their layouts."""
    return sum(_bytes(dtype, sizes) for dtype, sizes in _ARRAY.findall(text))


def _bytes(dtype: str, sizes: str) -> int:
    return _BYTES.get(dtype, 4) * math.prod(map(int, filter(None, sizes.split(","))))


def _instruction(line: str, match: re.Match) -> Instruction:
    text = line[match.end() :]
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    opcode, _, rest = text[end:].strip().partition("(")
    return Instruction(match[1], opcode, text[:end], rest, line.startswith("  ROOT "))


def _closing(text: str, depth: int) -> int:
    """Returns the index of the parenthesis that closes the one before `text`, or the one that `text` starts with."""
    depth = 0 if text.startswith("(") else 1
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return index
    return len(text)


def _logical(opcode: str, operands: list) -> bool | None:
    decisive = opcode == "or"
    if decisive in operands:
        return decisive
    # Beam search may stop early; its trip count is at most the counter's limit.
    known = [value for value in operands if value is not None]
    return known[0] if known and opcode == "and" else None


def _scalar(instruction: Instruction, operands: list) -> int | bool | None:
    """Returns the value of a scalar instruction, None if it is not known."""
    if instruction.opcode == "constant":
        text = instruction.rest.partition(")")[0]
        return {"true": True, "false": False}.get(text, int(text) if re.fullmatch(r"-?\d+", text) else None)
    if instruction.opcode in ("and", "or"):
        return _logical(instruction.opcode, operands)
    if not operands or None in operands:
        return None
    first, second = (*operands, 0)[:2]
    if instruction.opcode == "compare":
        direction = _match(r"direction=(\w+)", instruction.rest)[1]
        return {
            "LT": first < second,
            "LE": first <= second,
            "GT": first > second,
            "GE": first >= second,
            "EQ": first == second,
            "NE": first != second,
        }[direction]
    return {
        "add": first + second,
        "subtract": first - second,
        "multiply": first * second,
        "not": not first,
        "copy": first,
        "bitcast": first,
        "convert": first,
    }.get(instruction.opcode)
