"""How often the loops of a compiled module run; the TPU compiler's text does not say it.

A loop's counter is element 0 of its state. Its first value and what the body adds to it are read from the text, and the
condition is evaluated for each value until it is false.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

from lingvo_moe.analysis.instruction import Instruction

_Value = int | bool | None
_MAX_TRIPS = 100_000
_COMPARED = {name: getattr(operator, name.lower()) for name in ("LT", "LE", "GT", "GE", "EQ", "NE")}
_COMPUTED = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "not": lambda first, _: not first,
    "copy": lambda first, _: first,
    "bitcast": lambda first, _: first,
    "convert": lambda first, _: first,
}


class TripCounts:
    """The trip counts of a module's loops."""

    def __init__(self, computations: Mapping[str, Sequence[Instruction]]):
        """Takes the instructions of each computation, by its name."""
        self._computations = computations
        self._named = {i.name: i for instructions in computations.values() for i in instructions}
        self._counted: dict[str, int | None] = {}

    def of(self, loop: Instruction) -> int | None:
        """Returns how often a `while` runs its body; None if that depends on data."""
        if loop.name not in self._counted:
            trips = loop.known_trips
            self._counted[loop.name] = self._count(loop) if trips is None else trips
        return self._counted[loop.name]

    def _count(self, loop: Instruction) -> int | None:
        first, step = self._counter(loop)
        condition = loop.computation("condition")
        for trip in range(_MAX_TRIPS):
            value = self._condition(loop, condition, first + trip * step)
            if not value:
                return trip if value is False else None
        return None

    def _counter(self, loop: Instruction) -> tuple[int, int]:
        """Returns the first value of a loop's counter and what each trip adds; 0 and 1 where the text does not say."""
        initial = self._constant(self._initial(loop, 0))
        added = self._source(self._passed(loop, 0))
        steps = [self._constant(self._named[name]) for name in added.operands] if added.opcode == "add" else []
        return initial or 0, next((step for step in steps if step), 1)

    def _condition(self, loop: Instruction, computation: str, counter: int, arguments: Sequence[_Value] = ()) -> _Value:
        """Evaluates a loop's condition; None if it depends on data. `arguments` are those of a fusion in it."""
        values: dict[str, _Value] = {}
        for instruction in self._computations[computation]:
            operands = [values.get(name) for name in instruction.operands]
            if instruction.opcode == "parameter" and arguments:
                value = arguments[instruction.parameter]
            elif instruction.opcode == "fusion":
                value = self._condition(loop, instruction.computation("calls"), counter, operands)
            elif instruction.opcode == "get-tuple-element":
                value = counter if instruction.index == 0 else self._unchanged(loop, instruction.index)
            else:
                value = _evaluate(instruction, operands)
            values[instruction.name] = value
            if instruction.is_root:
                return value
        return None

    def _unchanged(self, loop: Instruction, index: int) -> _Value:
        """Returns the value of element `index` of a loop's state if the loop never changes it, else None.

        The limit of a gradient's loop is such a value: the last counter of the loop that it differentiates.
        """
        passed, initial = self._passed(loop, index), self._initial(loop, index)
        if passed.opcode != "get-tuple-element" or passed.index != index:
            return None
        if initial.opcode == "get-tuple-element" and initial.index == 0:
            producer = self._named[initial.operands[0]]
            return self._last_counter(producer) if producer.opcode == "while" else None
        return initial.scalar

    def _last_counter(self, loop: Instruction) -> int | None:
        trips, (first, step) = self.of(loop), self._counter(loop)
        return None if trips is None else first + trips * step

    def _initial(self, loop: Instruction, index: int) -> Instruction:
        """Returns what element `index` of a loop's state is before the first trip."""
        return self._source(self._named[self._named[loop.operands[0]].operands[index]])

    def _passed(self, loop: Instruction, index: int) -> Instruction:
        """Returns what a trip makes of element `index` of a loop's state."""
        root = next(i for i in self._computations[loop.computation("body")] if i.is_root)
        return self._named[root.operands[index]]

    def _source(self, instruction: Instruction) -> Instruction:
        """Returns the instruction that is copied."""
        while instruction.opcode in ("copy", "bitcast"):
            instruction = self._named[instruction.operands[0]]
        return instruction

    def _constant(self, instruction: Instruction) -> int | None:
        value = self._source(instruction).scalar
        return None if value is None else int(value)


def _evaluate(instruction: Instruction, operands: Sequence[_Value]) -> _Value:
    """Returns the value of a scalar instruction, None if it is not known."""
    if instruction.opcode == "constant":
        return instruction.scalar
    if instruction.opcode in ("and", "or"):
        return _logical(instruction.opcode, operands)
    if not operands or None in operands:
        return None
    first, second = (*operands, 0)[:2]
    if instruction.opcode == "compare":
        return _COMPARED[instruction.direction](first, second)
    return _COMPUTED[instruction.opcode](first, second) if instruction.opcode in _COMPUTED else None


def _logical(opcode: str, operands: Sequence[_Value]) -> bool | None:
    decisive = opcode == "or"
    if decisive in operands:
        return decisive
    # Beam search may stop early; its trip count is at most the counter's limit.
    known = [value for value in operands if value is not None]
    return bool(known[0]) if known and opcode == "and" else None
