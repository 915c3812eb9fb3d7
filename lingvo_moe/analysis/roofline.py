"""The time of a GPU's kernels by the roofline: our model, a lower bound.

XLA's CUDA compiler writes no cycles into the module, as the TPU's does. A kernel takes as long as its matrix products
at the GPU's peak, or as its operands and results at the memory's bandwidth, whichever is longer.
"""

from __future__ import annotations

import math
import re

from lingvo_moe.analysis.collectives import COLLECTIVES
from lingvo_moe.analysis.hlo import Module
from lingvo_moe.analysis.instruction import Instruction
from lingvo_moe.engines.cluster import Gpu

# They move nothing, or the instructions that they run are counted by themselves.
_FREE = (
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "while", "call", "conditional", "async-start",
    "async-update", "async-done", "after-all", "partition-id", "replica-id", "opt-barrier", "optimization-barrier",
)  # fmt: skip
_UPDATE = "dynamic-update-slice"
_SLICES = ("dynamic-slice", "slice", "gather")
_SAME_ELEMENTS = ("bitcast", "copy", "convert", "reshape", "transpose")
_SHAPE = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")


def cycles(module: Module, instruction: Instruction, gpu: Gpu) -> int:
    """Returns the cycles of a GPU's clock that one run of an instruction takes, 0 for collectives."""
    return math.ceil(seconds(module, instruction, gpu) * gpu.clock)


def seconds(module: Module, instruction: Instruction, gpu: Gpu) -> float:
    """Returns the seconds that one run of an instruction takes; raises ValueError for an unknown library call."""
    kind = instruction.opcode.removesuffix("-start").removesuffix("-done")
    if instruction.opcode in _FREE or kind in COLLECTIVES:
        return 0.0
    if instruction.opcode == "custom-call" and re.search(r'custom_call_target="__cu(blas|dnn)', instruction.rest):
        raise ValueError(f"{instruction.name} calls a library whose work is not counted")
    products = sum(_product_seconds(module, dot, gpu) for dot in _dots(module, instruction))
    return max(products, _bytes(module, instruction) / gpu.memory_bandwidth)


def _dots(module: Module, instruction: Instruction) -> list[Instruction]:
    if instruction.opcode == "dot":
        return [instruction]
    return [
        dot
        for name in module.called(instruction)
        for inner in module.computations[name]
        for dot in _dots(module, inner)
    ]


def _product_seconds(module: Module, dot: Instruction, gpu: Gpu) -> float:
    left = module.named(dot.operands[0]).result
    dtype, sizes = _shape(left)
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", dot.rest)
    depth = math.prod(sizes[int(d)] for d in contracted[1].split(",")) if contracted and contracted[1] else 1
    flops = 2 * math.prod(_shape(dot.result)[1]) * depth
    if dtype in ("bf16", "f16"):
        return flops / gpu.peak_flops
    return flops / (gpu.float32_flops if "operand_precision={highest" in dot.rest else gpu.tf32_flops)


def _bytes(module: Module, instruction: Instruction) -> int:
    """The bytes that an instruction reads from memory and writes to it."""
    if instruction.opcode == "fusion":
        inner = module.computations[instruction.computation("calls")]
        return _written(module, inner) + _read(module, inner)
    if instruction.opcode in _SLICES:
        return 2 * instruction.result_bytes
    if instruction.opcode == _UPDATE:
        return 2 * module.named(instruction.operands[1]).result_bytes
    return instruction.result_bytes + sum(module.named(name).result_bytes for name in instruction.operands)


def _written(module: Module, inner: list[Instruction]) -> int:
    """What a fusion writes: of a result that is updated in place, such as one layer's of all, the update."""
    size = 0
    for result in _results(module, inner):
        update = _origin(module, result)
        size += (module.named(update.operands[1]) if update.opcode == _UPDATE else result).result_bytes
    return size


def _read(module: Module, inner: list[Instruction]) -> int:
    """What a fusion reads: of an operand that is only sliced, such as the weights of all layers, the slices."""
    results = [_origin(module, result) for result in _results(module, inner)]
    updated = [_origin(module, module.named(made.operands[0])).name for made in results if made.opcode == _UPDATE]
    size = 0
    for parameter in inner:
        if parameter.opcode != "parameter" or parameter.name in updated:
            continue
        users = [(user, position) for user in inner for position in _positions(module, user, parameter)]
        if users and all(user.opcode in _SLICES and position == 0 for user, position in users):
            size += min(parameter.result_bytes, sum(user.result_bytes for user, _ in users))
        else:
            size += parameter.result_bytes
    return size


def _results(module: Module, inner: list[Instruction]) -> list[Instruction]:
    root = next(instruction for instruction in inner if instruction.is_root)
    return [module.named(name) for name in root.operands] if root.opcode == "tuple" else [root]


def _origin(module: Module, value: Instruction) -> Instruction:
    """The instruction that made a value's elements, whatever their form."""
    return _origin(module, module.named(value.operands[0])) if value.opcode in _SAME_ELEMENTS else value


def _positions(module: Module, user: Instruction, parameter: Instruction) -> list[int]:
    """The operands of an instruction, other than a change of form, that are a parameter."""
    if user.opcode in _SAME_ELEMENTS and not user.is_root:
        return []
    return [i for i, name in enumerate(user.operands) if _origin(module, module.named(name)) is parameter]


def _shape(text: str) -> tuple[str, list[int]]:
    dtype, sizes = _SHAPE.findall(text)[0]
    return dtype, [int(size) for size in sizes.split(",") if size]
