"""Y = U V W with one delayed reduction, with one at once, and with two: collectives and time by the compiled module.

    python -m tools.partitioning.partial_products [--sizes=4096,1024,4096,128]

The columns of U and the rows of V are sharded over the 8 cores of a TPU v3 slice, so that U V is a sum over cores
(docs/partial_values.md). Cycles are the TPU compiler's, seconds of collectives those of `analysis.hardware`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from absl import flags

from lingvo_moe.analysis.collectives import find_collectives
from lingvo_moe.analysis.hardware import GENERATIONS, links_of
from lingvo_moe.analysis.hlo import Module
from lingvo_moe.cli import app
from lingvo_moe.engines.topology import Slice
from lingvo_moe.errors import OutOfMemory, UserError
from lingvo_moe.lazy import tf
from lingvo_moe.program import lower
from lingvo_moe.ranges import Range
from lingvo_moe.sharding.layout import AxisRule, DeviceMesh, Layout, Spec
from lingvo_moe.sharding.partial import partial_sum, product, reduce
from lingvo_moe.utils import field_values

_VALUES = flags.FlagValues()
flags.DEFINE_list("sizes", ["4096", "1024", "4096", "128"], "rows of U, of V, of W, columns of W", flag_values=_VALUES)

_LARGEST = 2**20  # of a size; the compiler says whether the matrices fit
_SLICE = "v3:2x2x1"
# Of U [B, M], V [M, H] and W [H, D]; a lower-case letter is not sharded.
_LAYOUT = Layout(DeviceMesh((8,)), (AxisRule("MH", ("x",)),))


def _delayed(i: dict) -> tf.Tensor:
    return reduce(product("Bh,hD->BD", partial_sum("BM,Mh->Bh", i["U"], i["V"], _LAYOUT), i["W"]))


def _at_once(i: dict) -> tf.Tensor:
    return tf.matmul(reduce(partial_sum("BM,Mh->Bh", i["U"], i["V"], _LAYOUT)), i["W"])


def _twice(i: dict) -> tf.Tensor:
    return reduce(partial_sum("BH,HD->BD", reduce(partial_sum("BM,MH->BH", i["U"], i["V"], _LAYOUT)), i["W"], _LAYOUT))


# By name: the function, and the logical axes of W, whose rows the last one shards.
PLANS: dict[str, tuple[Callable[[dict], tf.Tensor], str]] = {
    "one reduction, of Y": (_delayed, "hD"),
    "one reduction, of U V": (_at_once, "hD"),
    "two, of U V by ReduceScatter and of Y": (_twice, "HD"),
}


def measure(name: str, sizes: tuple[int, ...]) -> tuple[list[tuple[str, int]], float, float]:
    """Compiles a plan; returns ((kind, bytes) of its collectives, seconds of products, seconds of collectives)."""
    function, axes_of_w = PLANS[name]
    axes = {"U": "BM", "V": "MH", "W": axes_of_w}
    shapes = {factor: sizes[start : start + 2] for start, factor in enumerate(axes)}
    specs = {factor: Spec(shapes[factor], "float32", axes[factor]) for factor in axes}
    target = Slice.of(_SLICE)
    hlo = target.compile(lower("product", lambda i: {"Y": function(i)}, specs, {"Y": "BD"}, _LAYOUT)).hlo()
    module = Module(hlo, _LAYOUT.mesh.size)
    generation = GENERATIONS[target.generation]
    links, found = links_of(target), find_collectives(module)
    cycles = sum(instruction.cycles * times for instruction, times in module.runs())
    sent = sum(c.times * c.seconds(links) for c in found)
    return [(c.kind, c.bytes * c.times) for c in found], cycles / (generation.clock or np.nan), sent


def main(arguments: list[str]):
    """Prints a row for each plan."""
    app.no_arguments(arguments[1:])
    sizes = _sizes()
    print("| reductions | collectives of a core | matmuls ms | collectives ms | together ms |\n|---|---|---|---|---|")
    for name in PLANS:
        try:
            found, products, sent = measure(name, sizes)
        except OutOfMemory as error:
            raise UserError(f"--sizes={','.join(_VALUES.sizes)}: {error}; pass smaller sizes.") from None
        collectives = ", ".join(f"{kind} {size / 2**20:,.1f} MiB" for kind, size in found)
        times = (f"{1e3 * seconds:.2f}" for seconds in (products, sent, products + sent))
        print(f"| {' | '.join((name, collectives, *times))} |", flush=True)


def _sizes() -> tuple[int, ...]:
    sizes = [field_values.whole_number(text, Range(8, _LARGEST)) for text in _VALUES.sizes]
    if len(sizes) != 4 or any(size is None or size % 8 for size in sizes):
        raise UserError(
            f"--sizes={','.join(_VALUES.sizes)}: expected four multiples of 8, the cores, up to {_LARGEST:,}, for "
            f"instance 4096,1024,4096,128."
        )
    return tuple(size for size in sizes if size)


if __name__ == "__main__":
    app.run(main, _VALUES)
