"""One instruction of the text (HLO) of a compiled, partitioned XLA module."""

from __future__ import annotations

import dataclasses
import functools
import math
import re

_INSTRUCTION = re.compile(r"^  (?:ROOT )?%?([\w.\-]+) = ")
ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")  # the text of an array's type: element type, sizes
# Instructions whose result has the elements of their operand, in another form.
SAME_ELEMENTS = ("bitcast", "copy", "convert", "reshape", "transpose")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_CONTROL_PREDECESSORS = re.compile(r"control-predecessors=\{[^}]*\}")
_KNOWN_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
# Element types are named by their bits: s4, bf16, f8e4m3fn, and c64 of two f32; but these.
_BITS = re.compile(r"(?:bf|[fsuc])(\d+)(?:e\d+m\d+\w*)?")
_OTHER_BITS = {"pred": 8, "token": 0, "opaque": 0}


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
        """Bytes of the result, of all elements of a tuple, without the padding of its layout; raises as `bytes_of`."""
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

    @functools.cached_property
    def scalar(self) -> int | bool | None:
        """The value of a `constant` that is an integer or a truth value; None of any other instruction."""
        if self.opcode != "constant":
            return None
        text = self.rest.partition(")")[0]
        return {"true": True, "false": False}.get(text, int(text) if re.fullmatch(r"-?\d+", text) else None)

    @property
    def parameter(self) -> int:
        """The number of a `parameter`."""
        return int(self.rest.partition(")")[0])

    @functools.cached_property
    def direction(self) -> str:
        """The direction of a `compare`: LT, LE, GT, GE, EQ or NE."""
        return _match(r"direction=(\w+)", self.rest)[1]

    @functools.cached_property
    def operands(self) -> list[str]:
        """Names of the operands."""
        return re.findall(r"%([\w.\-]+)", self.rest[: _closing(self.rest)])

    @functools.cached_property
    def index(self) -> int:
        """The index of a `get-tuple-element`."""
        return int(_match(r"index=(\d+)", self.rest)[1])

    @property
    def references(self) -> list[str]:
        """Names that the attributes refer to: the computations that it calls, whatever the attribute."""
        attributes = _CONTROL_PREDECESSORS.sub("", self.rest[_closing(self.rest) :])
        return re.findall(r"%([\w.\-]+)", attributes)

    @property
    def known_trips(self) -> int | None:
        """How often a `while` runs its body, if the text says it (of a CPU or GPU)."""
        match = _KNOWN_TRIPS.search(self.rest)
        return int(match[1]) if match else None

    def computation(self, name: str) -> str:
        """Returns the computation that an attribute (`body`, `condition`, `calls`) names."""
        return _match(rf"\b{name}=%?([\w.\-]+)", self.rest)[1]


def instruction_of(line: str) -> Instruction | None:
    """Returns the instruction of a line of a computation; None if the line has none."""
    match = _INSTRUCTION.match(line)
    if match is None:
        return None
    text = line[match.end() :]
    end = _closing(text) + 1 if text.startswith("(") else text.index(" ")
    opcode, _, rest = text[end:].strip().partition("(")
    return Instruction(match[1], opcode, text[:end], rest, line.startswith("  ROOT "))


def array_bytes(text: str) -> int:
    """Returns the bytes of all arrays that a type's text has, without the padding of layouts; raises as `bytes_of`."""
    return sum(bytes_of(dtype, sizes) for dtype, sizes in ARRAY.findall(text))


def bytes_of(dtype: str, sizes: str) -> int:
    """Returns the bytes of an array from the text of its element type and of its sizes, as ARRAY finds them.

    Raises:
      ValueError: an unknown element type.
    """
    named = _BITS.fullmatch(dtype)
    if named is None and dtype not in _OTHER_BITS:
        raise ValueError(f"{dtype}[{sizes}] has an unknown element type")
    bits = int(named[1]) if named else _OTHER_BITS[dtype]
    return -(-bits * math.prod(map(int, filter(None, sizes.split(",")))) // 8)


def _match(pattern: str, text: str) -> re.Match[str]:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"{pattern!r} is not in the instruction's text {text[:200]!r}")
    return match


def _closing(text: str) -> int:
    """Returns the index of the parenthesis that closes the one before `text`, or the one that `text` starts with."""
    depth = 0 if text.startswith("(") else 1
    for parenthesis in re.finditer("[()]", text):
        depth += 1 if parenthesis[0] == "(" else -1
        if depth == 0:
            return parenthesis.start()
    return len(text)
