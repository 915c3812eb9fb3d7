"""The time of kernels by the roofline: our model, a lower bound.

A kernel takes as long as its matrix products at the device's peak, or as its operands and results at the memory's
bandwidth, whichever is longer. For GPUs it is a plan's time, since XLA's CUDA compiler writes no cycles into the
module. For TPUs it is what their compiler's cycles are compared with (GShard section 5.2).
"""

from __future__ import annotations

import math
import re

from lingvo_moe.analysis.collectives import COLLECTIVES
from lingvo_moe.analysis.hardware import Generation
from lingvo_moe.analysis.hlo import WITHOUT_BUFFER, Module
from lingvo_moe.analysis.instruction import ARRAY, SAME_ELEMENTS, Instruction, array_bytes
from lingvo_moe.engines.cluster import Gpu

# They move nothing, or the instructions that they run are counted by themselves.
_FREE = (
    *WITHOUT_BUFFER, "constant", "async-start", "async-update", "async-done", "after-all", "partition-id", "replica-id",
)  # fmt: skip
_UPDATE = "dynamic-update-slice"
_SLICES = ("dynamic-slice", "slice", "gather")
_LIBRARY = re.compile(r'custom_call_target="__cu(blas|dnn)')
_LIBRARY_PRODUCT = re.compile(r'"gemm_backend_config":')
# Of products, in XLA's own notation and in that of its calls of cuBLAS.
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)[}\]]')
_EXACT = re.compile(r'operand_precision(?:=\{highest|":\["HIGHEST)')
EXACT_PASSES = 6  # of a TPU's matrix unit, which multiplies bfloat16, for an exact product of float32
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
# Of each spatial dimension of a convolution, in XLA's notation of windows: `size=1x16 pad=0_0x15_15 rhs_reversal=0x1`.
_WINDOW = re.compile(r"window=\{([^}]*)\}")


def cycles(module: Module, instruction: Instruction, gpu: Gpu) -> int:
    """Returns the cycles of a GPU's clock that one run of an instruction takes, 0 for collectives."""
    return math.ceil(seconds(module, instruction, gpu) * gpu.clock)


def seconds(module: Module, instruction: Instruction, device: Gpu | Generation) -> float:
    """Returns the seconds that one run of an instruction takes; raises ValueError for an unknown library or type."""
    kind = instruction.opcode.removesuffix("-start").removesuffix("-done")
    if instruction.opcode in _FREE or kind in COLLECTIVES:
        return 0.0
    if _is_library_call(instruction) and not _is_library_product(instruction):
        raise ValueError(f"{instruction.name} calls a library whose work is not counted")
    return max(product_seconds(module, instruction, device), _bytes(module, instruction) / device.memory_bandwidth)


def product_seconds(module: Module, instruction: Instruction, device: Gpu | Generation) -> float:
    """Returns the seconds of the matrix products alone of one run of an instruction, at the device's peak."""
    return sum(_product_seconds(module, product, device) for product in _products(module, instruction))


def _products(module: Module, instruction: Instruction) -> list[Instruction]:
    """The matrix products of an instruction; a TPU's compiler writes them as convolutions."""
    if instruction.opcode in ("dot", "convolution") or _is_library_product(instruction):
        return [instruction]
    return [
        product
        for name in module.called(instruction)
        for inner in module.computations[name]
        for product in _products(module, inner)
    ]


def _is_library_call(instruction: Instruction) -> bool:
    return instruction.opcode == "custom-call" and _LIBRARY.search(instruction.rest) is not None


def _is_library_product(instruction: Instruction) -> bool:
    """Whether cuBLAS makes a product; its result is a tuple of the product and of memory to work in."""
    return _is_library_call(instruction) and _LIBRARY_PRODUCT.search(instruction.rest) is not None


def _product_seconds(module: Module, product: Instruction, device: Gpu | Generation) -> float:
    flops = _convolution_flops(module, product) if product.opcode == "convolution" else _dot_flops(module, product)
    is_exact = _EXACT.search(product.rest) is not None
    if isinstance(device, Generation):
        return flops * (EXACT_PASSES if is_exact else 1) / device.peak_flops
    if _shape(module.named(product.operands[0]).result)[0] in ("bf16", "f16"):
        return flops / device.peak_flops
    return flops / (device.float32_flops if is_exact else device.tf32_flops)


def _dot_flops(module: Module, dot: Instruction) -> int:
    _, sizes = _shape(module.named(dot.operands[0]).result)
    contracted = _CONTRACTED.search(dot.rest)
    depth = math.prod(sizes[int(d)] for d in re.findall(r"\d+", contracted[1])) if contracted else 1
    return 2 * math.prod(_shape(dot.result)[1]) * depth


def _convolution_flops(module: Module, convolution: Instruction) -> int:
    """Two for each element of the kernel that is applied to an element of the input, not to padding or a dilation."""
    labels = _LABELS.search(convolution.rest)
    if labels is None:
        raise ValueError(f"{convolution.name} is a convolution without dim_labels")
    shapes = [_shape(module.named(name).result)[1] for name in convolution.operands[:2]]
    left, right, out = (
        dict(zip(text, sizes)) for text, sizes in zip(labels.groups(), (*shapes, _shape(convolution.result)[1]))
    )
    pairs = math.prod(_count_taps(convolution, int(d), left[d], right[d], out[d]) for d in labels[3] if d.isdigit())
    return 2 * out["b"] * out["f"] * right["i"] * pairs


def _count_taps(convolution: Instruction, dimension: int, left: int, right: int, out: int) -> int:
    """How many pairs of an output's and a kernel's position in a spatial dimension read an element of the input."""
    matched = _WINDOW.search(convolution.rest)
    options = dict(option.split("=") for option in matched[1].split()) if matched else {}

    def of(name: str, default: str) -> int:
        values = options[name].split("x") if name in options else [default] * (dimension + 1)
        return int(values[dimension].partition("_")[0])

    stride, padding, holes, spread = of("stride", "1"), of("pad", "0"), of("lhs_dilate", "1"), of("rhs_dilate", "1")
    taps = (position * stride + element * spread - padding for position in range(out) for element in range(right))
    return sum(0 <= tap <= (left - 1) * holes and tap % holes == 0 for tap in taps)


def _bytes(module: Module, instruction: Instruction) -> int:
    """The bytes that an instruction reads from memory and writes to it."""
    if instruction.opcode == "fusion":
        inner = module.computations[instruction.computation("calls")]
        return _written(module, inner) + _read(module, inner)
    if instruction.opcode in _SLICES:
        return 2 * instruction.result_bytes
    if _is_library_product(instruction):
        product = next(ARRAY.finditer(instruction.result))[0]
        return array_bytes(product) + sum(module.named(name).result_bytes for name in instruction.operands)
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
    return _origin(module, module.named(value.operands[0])) if value.opcode in SAME_ELEMENTS else value


def _positions(module: Module, user: Instruction, parameter: Instruction) -> list[int]:
    """The operands of an instruction, other than a change of form, that are a parameter."""
    if user.opcode in SAME_ELEMENTS and not user.is_root:
        return []
    return [i for i, name in enumerate(user.operands) if _origin(module, module.named(name)) is parameter]


def _shape(text: str) -> tuple[str, list[int]]:
    dtype, sizes = ARRAY.findall(text)[0]
    return dtype, [int(size) for size in sizes.split(",") if size]
