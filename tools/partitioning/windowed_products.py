"""Compares windowed einsums with gathered ones, where one mesh axis shards the factors along different dimensions.

    python -m tools.partitioning.windowed_products [--products=NAME,...] [--gradients]

Each product is that of a feed-forward layer of a model of the zoo, on TPU v3 (docs/operators.md). Memory is the TPU
compiler's account of temporaries, cycles are its estimates, and the time of collectives is that of `analysis.hardware`.
A collective is hidden for as long as the core computes between its asynchronous start and its end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from absl import flags

from lingvo_moe.analysis.collectives import Collective, find_collectives
from lingvo_moe.analysis.hardware import GENERATIONS, links_of
from lingvo_moe.analysis.hlo import Module
from lingvo_moe.cli import app
from lingvo_moe.engines.topology import Compiled, Slice, v3_slice
from lingvo_moe.errors import OutOfMemory, UserError, did_you_mean
from lingvo_moe.lazy import tf
from lingvo_moe.ops.windowed import windowed_einsum
from lingvo_moe.program import lower
from lingvo_moe.sharding.layout import DeviceMesh, Layout, Spec

_VALUES = flags.FlagValues()
flags.DEFINE_list("products", [], "products to compare; by default all", flag_values=_VALUES)
flags.DEFINE_bool("gradients", False, "compile each product with both of its gradients", flag_values=_VALUES)


@dataclasses.dataclass(frozen=True)
class Product:
    """A product of a layer: bfloat16 activations and float32 weights, which are rounded before they move.

    Attributes:
      mesh, layout: the model's.
      equation: the logical axes of the activations, the weights and the result.
      mesh_axis: the mesh axis that shards the activations and the weights along different dimensions.
      sizes: the sizes of the activations' axes, then those of the weights' other ones.
    """

    mesh: tuple[int, ...]
    layout: str
    equation: str
    mesh_axis: str
    sizes: tuple[int, ...]

    @property
    def axes(self) -> tuple[str, str, str]:
        """The logical axes of the activations, the weights and the result."""
        x, w, y = self.equation.replace("->", ",").split(",")
        return x, w, y

    @property
    def specs(self) -> dict[str, Spec]:
        """The specs of the activations x and the weights w."""
        size = dict(zip(dict.fromkeys("".join(self.axes[:2])), self.sizes, strict=True))
        shapes = (tuple(size[axis] for axis in axes) for axes in self.axes[:2])
        return {
            name: Spec(shape, dtype, axes)
            for name, shape, dtype, axes in zip("xw", shapes, ("bfloat16", "float32"), self.axes[:2])
        }


# GSPMD's 2-D layout shards the batch and the weights' M along x, and the activations' M and the weights' H along y.
# `gshard_sharded_update` has one mesh axis, along which it shards the batch and the weights' H.
PRODUCTS = {
    "Narrow16B weights": Product((8, 16), "gspmd", "BTM,MH->BTH", "x", (96, 1024, 4096, 16_384)),
    "Narrow16B activations": Product((8, 16), "gspmd", "BTM,MH->BTH", "y", (96, 1024, 4096, 16_384)),
    "Dense64B weights": Product((8, 16), "gspmd", "BTM,MH->BTH", "x", (64, 1024, 8192, 65_536)),
    "Dense64B activations": Product((8, 16), "gspmd", "BTM,MH->BTH", "y", (64, 1024, 8192, 65_536)),
    "T(96L) on 8 cores": Product((8,), "gshard_sharded_update", "BTM,MH->BTH", "x", (128, 128, 1024, 8192)),
    "Dense1T on 8 cores": Product((8,), "gshard_sharded_update", "BTM,MH->BTH", "x", (8, 1024, 16_384, 131_072)),
}


def _einsum(product: Product, layout: Layout) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    def function(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        factors = (layout.annotate(factor, axes) for factor, axes in zip((x, w), product.axes))
        return layout.annotate(tf.einsum(product.equation, *factors), product.axes[2])

    return function


def _in_slices(product: Product, layout: Layout) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    return lambda x, w: windowed_einsum(product.equation, x, w, product.mesh_axis, layout)


_NEVER = 10**6  # MiB; CollectivePermutes are asynchronous, which they are not by default on TPU v3
# By name: the function, and the program's `windowed_einsum_mib`.
FORMS = {
    "gathered": (_einsum, _NEVER),
    "in slices, by XLA": (_einsum, 0),
    "in slices, `ops.windowed`": (_in_slices, _NEVER),
}


@dataclasses.dataclass(frozen=True)
class Figures:
    """What a form of a product costs a core.

    Attributes:
      temporaries: bytes beside inputs and outputs.
      collectives: of the compiled module.
      compute: seconds, without collectives.
      collective: seconds of all collectives, one after the other.
      hidden: those of them during which the core computes.
    """

    temporaries: int
    collectives: tuple[Collective, ...]
    compute: float
    collective: float
    hidden: float

    @property
    def seconds(self) -> float:
        """The time of the product, with the overlap of the compiler's schedule."""
        return self.compute + self.collective - self.hidden


def measure(product: Product, form: str, gradients: bool) -> Figures:
    """Compiles a form of a product, or of it and both gradients, for TPU v3; raises OutOfMemory if it does not fit."""
    make, threshold = FORMS[form]
    layout = Layout.of(DeviceMesh(product.mesh), product.layout)
    function = make(product, layout)

    def forward(i: dict) -> dict:
        return {"y": function(i["x"], tf.cast(i["w"], tf.bfloat16))}

    def backward(i: dict) -> dict:
        factors = [i["x"], i["w"]]
        with tf.GradientTape() as tape:
            tape.watch(factors)
            y = forward(i)["y"]
        return {"y": y, **dict(zip(("dx", "dw"), tape.gradient(y, factors, i["dy"])))}

    x, w, y = product.axes
    specs, outputs = product.specs, {"y": y, "dx": x, "dw": w}
    if gradients:
        size = dict(zip(x + w, specs["x"].shape + specs["w"].shape))
        specs["dy"] = Spec(tuple(size[axis] for axis in y), "bfloat16", y)
    program = lower("product", backward if gradients else forward, specs, outputs, layout)
    target = Slice.of(v3_slice(layout.mesh.size))
    return _figures(target, target.compile(dataclasses.replace(program, windowed_einsum_mib=threshold)))


def _figures(target: Slice, compiled: Compiled) -> Figures:
    module = Module(compiled.hlo(), len(target.devices))
    generation = GENERATIONS[target.generation]
    links, found = links_of(target), find_collectives(module)
    clock = generation.clock or float("nan")
    seconds = [c.seconds(links) for c in found]
    return Figures(
        compiled.memory().temp_size_in_bytes,
        tuple(found),
        sum(instruction.cycles * times for instruction, times in module.runs()) / clock,
        sum(c.times * each for c, each in zip(found, seconds)),
        sum(c.times * min(each, c.overlapped_cycles / clock) for c, each in zip(found, seconds)),
    )


def _row(name: str, form: str, figures: Figures) -> str:
    sent: dict[str, list[float]] = {}
    for collective in figures.collectives:
        runs, size = sent.setdefault(collective.kind, [0, 0.0])
        sent[collective.kind] = [runs + collective.times, size + collective.times * collective.bytes]
    collectives = ", ".join(f"{runs} {kind} {size / 2**20:,.0f} MiB" for kind, (runs, size) in sent.items())
    times = (figures.compute, figures.collective, figures.hidden, figures.seconds)
    cells = (name, form, f"{figures.temporaries / 2**20:,.0f}", collectives, *(f"{1e3 * each:.2f}" for each in times))
    return f"| {' | '.join(cells)} |"


def main(arguments: list[str]):
    """Prints a row for each form of each product."""
    app.no_arguments(arguments[1:])
    for name in _VALUES.products:
        if name not in PRODUCTS:
            raise UserError(
                f"--products={','.join(_VALUES.products)}: no product {name!r}.{did_you_mean(name, PRODUCTS)} Known: "
                f"{', '.join(PRODUCTS)}."
            )
    print("| matmul | form | temporaries MiB | collectives of a core | compute ms | collectives ms | hidden ms | ms |")
    print("|---|---|---|---|---|---|---|---|")
    for name in _VALUES.products or PRODUCTS:
        for form in FORMS:
            try:
                print(_row(name, form, measure(PRODUCTS[name], form, _VALUES.gradients)), flush=True)
            except OutOfMemory as error:
                print(f"| {name} | {form} | needs {error.needed / 2**30:.1f} GiB | | | | | |", flush=True)


if __name__ == "__main__":
    app.run(main, _VALUES)
