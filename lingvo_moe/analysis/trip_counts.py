"""How often the loops of a compiled module run; the TPU compiler's text does not say it.

A loop's counter is element 0 of its state, or another one in loops that the compiler makes late, as those of products
in slices. Its first value and what the body adds to it are read from the text, and the condition is evaluated for each
value until it is false. Where the state is made by another instruction than a `tuple`, the text does not have them, and
they are 0 and 1. A counter that starts at data, or to which data is added, has no trip count.
"""

from __future__ import annotations

import dataclasses
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


@dataclasses.dataclass(frozen=True)
class _Counter:
    """An element of a loop's state: its index, its first value, and what each trip adds."""

    index: int
    first: int
    step: int

    def after(self, trips: int) -> int:
        """Returns the value after a number of trips."""
        return self.first + trips * self.step


class TripCounts:
    """The trip counts of a module's loops."""

    def __init__(self, computations: Mapping[str, Sequence[Instruction]]):
        """Takes the instructions of each computation, by its name."""
        self._computations = computations
        self._named = {i.name: i for instructions in computations.values() for i in instructions}
        self._counted: dict[str, int | None] = {}

    def of(self, loop: Instruction) -> int | None:
        """Returns how often a `while` runs its body; None if that depends on data or is more than 100,000."""
        if loop.name not in self._counted:
            trips = loop.known_trips
            self._counted[loop.name] = self._count(loop) if trips is None else trips
        return self._counted[loop.name]

    def _count(self, loop: Instruction) -> int | None:
        counter = self._counter(loop)
        if counter is None:
            return None
        condition = loop.computation("condition")
        for trip in range(_MAX_TRIPS):
            value = self._condition(loop, condition, (counter.index, counter.after(trip)))
            if not value:
                return trip if value is False else None
        return None

    def _counter(self, loop: Instruction) -> _Counter | None:
        """Returns a loop's counter, the first that the condition reads; None if it depends on data."""
        condition = self._computations[loop.computation("condition")]
        read = sorted({i.index for i in condition if i.opcode == "get-tuple-element"})
        index = next((index for index in read if self._counts(loop, index)), 0)
        first, step = self._first(loop, index), self._step(loop, index)
        return None if first is None or step is None else _Counter(index, first, step)

    def _counts(self, loop: Instruction, index: int) -> bool:
        """Returns whether the text says that element `index` of a loop's state is a counter."""
        is_in_text = self._initial(loop, index) is not None and self._passed(loop, index) is not None
        return is_in_text and self._first(loop, index) is not None and self._step(loop, index) is not None

    def _first(self, loop: Instruction, index: int) -> int | None:
        """Returns a counter's first value, 0 where the text does not say; None if it depends on data."""
        initial = self._initial(loop, index)
        return 0 if initial is None else self._constant(initial)

    def _step(self, loop: Instruction, index: int) -> int | None:
        """Returns what each trip adds to a counter, 1 where the text does not say; None if that is no constant."""
        passed = self._passed(loop, index)
        if passed is None:
            return 1
        passed, operands = self._computed(passed)
        if passed.opcode not in ("add", "subtract"):
            return None
        before, by = map(self._source, operands)
        if passed.opcode == "add" and _is_element(by, index):
            before, by = by, before
        step = self._constant(by) if _is_element(before, index) else None
        return -step if step is not None and passed.opcode == "subtract" else step

    def _condition(
        self, loop: Instruction, computation: str, counter: tuple[int, int], arguments: Sequence[_Value] = ()
    ) -> _Value:
        """Evaluates a loop's condition; None if it depends on data.

        Args:
          loop: the loop.
          computation: its condition, or a fusion in it.
          counter: the index of its counter in its state, and the counter's value.
          arguments: those of a fusion.
        """
        values: dict[str, _Value] = {}
        for instruction in self._computations[computation]:
            operands = [values.get(name) for name in instruction.operands]
            if instruction.opcode == "parameter" and arguments:
                value = arguments[instruction.parameter]
            elif instruction.opcode == "fusion":
                value = self._condition(loop, instruction.computation("calls"), counter, operands)
            elif instruction.opcode == "get-tuple-element":
                index, value = counter
                value = value if instruction.index == index else self._unchanged(loop, instruction.index)
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
        if initial is None or not _is_element(passed, index):
            return None
        if _is_element(initial, 0):
            producer = self._named[initial.operands[0]]
            return self._last_counter(producer) if producer.opcode == "while" else None
        return initial.scalar

    def _last_counter(self, loop: Instruction) -> int | None:
        trips, counter = self.of(loop), self._counter(loop)
        return None if trips is None or counter is None or counter.index else counter.after(trips)

    def _initial(self, loop: Instruction, index: int) -> Instruction | None:
        """Returns what element `index` of a loop's state is before the first trip; None where the text does not say."""
        return self._source(self._element(self._named[loop.operands[0]], index))

    def _passed(self, loop: Instruction, index: int) -> Instruction | None:
        """Returns what a trip makes of element `index` of a loop's state; None where the text does not say."""
        root = next(i for i in self._computations[loop.computation("body")] if i.is_root)
        return self._source(self._element(root, index))

    def _computed(self, instruction: Instruction) -> tuple[Instruction, list[Instruction]]:
        """Returns an instruction and its operands; of a fusion, as GPUs add in one, its root and the root's."""
        operands = [self._named[name] for name in instruction.operands]
        if instruction.opcode != "fusion":
            return instruction, operands
        root = next(i for i in self._computations[instruction.computation("calls")] if i.is_root)
        inside = [self._named[name] for name in root.operands]
        return root, [operands[i.parameter] if i.opcode == "parameter" else i for i in inside]

    def _element(self, state: Instruction, index: int) -> Instruction | None:
        """Returns an element of a `tuple`; None of another instruction, as a parameter or a loop."""
        return self._named[state.operands[index]] if state.opcode == "tuple" else None

    def _source(self, instruction: Instruction | None) -> Instruction | None:
        """Returns the instruction that is copied."""
        while instruction and instruction.opcode in ("copy", "bitcast"):
            instruction = self._named[instruction.operands[0]]
        return instruction

    def _constant(self, instruction: Instruction | None) -> int | None:
        source = self._source(instruction)
        return None if source is None or source.scalar is None else int(source.scalar)


def _is_element(instruction: Instruction | None, index: int) -> bool:
    return instruction is not None and instruction.opcode == "get-tuple-element" and instruction.index == index


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
    if None not in operands:
        return not decisive
    # Beam search may stop early; its trip count is at most the counter's limit.
    known = [value for value in operands if value is not None]
    return bool(known[0]) if known and opcode == "and" else None
