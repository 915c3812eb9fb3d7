"""The report's three figures, after GShard's figures 7, 8 and 9: what is drawn, and from which plans."""

from __future__ import annotations

from xml.etree.ElementTree import Element

from lingvo_moe.analysis.hardware import Torus
from lingvo_moe.analysis.plan import Plan
from lingvo_moe.engines.topology import v3_slice
from tools.report import figures, reading
from tools.report.figures import BLUE, DARK, GREEN, GREY, LIGHT, ORANGE, PURPLE, SKY, VERMILLION, YELLOW, Bar
from tools.report.markup import Column, element, table
from tools.report.reading import GIB, V3, Plans
from tools.report.tables import M4, change, gib, pairs_of_experts, percent, seconds

CORE_GIB = 16  # of memory, a TPU v3 core (Jouppi et al. 2020, table 1)
PARTITIONS = tuple(2**exponent for exponent in range(4, 12))
SIZES = (8, 32)  # MiB
_COMPARED = {"AllToAll": "all-to-all", "AllReduce": "all-reduce"}
_ACTIVATIONS = "activations, inputs, buffers"
_MEMORY = {"replicated weights": BLUE, "distributed weights": ORANGE, "optimizer state": PURPLE, _ACTIVATIONS: SKY}
_AT_PEAK, _ROOFLINE = "roofline: all compute at the peak", "roofline"
_TIME = {
    _AT_PEAK: "#5f7ea8",
    **dict(zip(reading.PARTS, (BLUE, SKY, GREEN, "#6a3d9a", YELLOW, GREY, DARK, LIGHT))),
    **dict(zip(reading.COLLECTIVES, (VERMILLION, PURPLE, ORANGE))),
}


def memory(plans: Plans) -> Element:
    """GShard figure 7, and pairs with as many tokens per core."""
    marks = [(CORE_GIB, f"{CORE_GIB} GiB")]
    available = reading.available(plans)
    if available is not None:
        marks.append((available / GIB, f"{gib(available)} available"))
    pairs = [
        bar
        for few, many in pairs_of_experts()
        for bar in (_memory_bar(plans, few.plan, few.model), _memory_bar(plans, many.plan, many.model, beside=few.plan))
    ]
    groups = [
        ("as published", [_memory_bar(plans, row.plan, row.model) for row in M4]),
        ("with as many tokens on each core", pairs),
    ]
    with figures.settings():
        figure = figures.stacked(groups, _MEMORY, "GiB per core", marks)
        return figures.svg(
            figure,
            "memory",
            "Stacked bars: GiB of a core's memory by what it holds, for each M4 model; "
            "the table below has the same figures.",
        )


def _memory_bar(plans: Plans, name: str, label: str, beside: str = "") -> Bar:
    plan = plans.get(name)
    if plan is None:
        return label, {}, "not planned"
    of = plan.memory
    values = dict(
        zip(
            _MEMORY,
            (
                of.replicated_weights,
                of.distributed_weights,
                of.optimizer_state,
                of.inputs + of.temporaries if plan.fits else 0,
            ),
        )
    )
    end = gib(of.total) if plan.fits else f"and more: does not fit, needs {gib(of.needed)}"
    other = reading.fitting(plans, beside)
    if plan.fits and other is not None and not reading.unlike(other, plan):
        end += f", {change(of.total, other.memory.total)}"
    return label, {kind: size / GIB for kind, size in values.items()}, end


def time(plans: Plans) -> Element:
    """GShard figure 8: seconds of a step by part and exchange, and below each its roofline."""
    groups = [
        (
            f"{layers} layers",
            [bar for row in M4 if f" {layers}L" in row.model for bar in _time_bars(plans.get(row.plan), row.model)],
        )
        for layers in (12, 36, 60)
    ]
    with figures.settings():
        figure = figures.stacked(groups, _TIME, "seconds of one training step", thin=_ROOFLINE)
        return figures.svg(
            figure,
            "time",
            "Stacked bars: seconds of a training step by part of the model and kind of "
            "exchange, for each M4 model and its roofline; the table below has sums of the same figures.",
        )


def _time_bars(plan: Plan | None, label: str) -> list[Bar]:
    if plan is None or not plan.fits:
        return [(label, {}, "not planned" if plan is None else "does not fit")]
    collectives = reading.collectives_by_kind(plan)
    roofline = reading.roofline_seconds(plan)
    return [
        (
            label,
            reading.compute_by_part(plan) | collectives,
            f"{seconds(plan.step_seconds)} s, AllToAll {percent(collectives['AllToAll'] / plan.step_seconds, 0)}",
        ),
        (
            _ROOFLINE,
            {_AT_PEAK: reading.peak_seconds(plan)} | collectives,
            f"{seconds(roofline)} s, {percent(roofline / plan.step_seconds, 0)} of the step",
        ),
    ]


def collective_seconds(kind: str, partitions: int, mebibytes: int) -> float:
    """Our model's time of a collective among all cores of the squarest TPU v3 slice of so many."""
    return Torus(V3, _chips(partitions)).seconds(kind, mebibytes * 2**20, partitions, 1)


def _chips(partitions: int) -> tuple[int, ...]:
    return tuple(map(int, v3_slice(partitions).partition(":")[2].split("x")))


def collective_growth(kind: str) -> float:
    """From the fewest partitions to the most."""
    return collective_seconds(kind, PARTITIONS[-1], SIZES[0]) / collective_seconds(kind, PARTITIONS[0], SIZES[0])


def collectives() -> Element:
    """GShard figure 9."""
    series = [
        (
            f"{name}, {size} MiB",
            PARTITIONS,
            [1e3 * collective_seconds(kind, count, size) for count in PARTITIONS],
            VERMILLION if name == "AllToAll" else BLUE,
            size == SIZES[0],
        )
        for name, kind in _COMPARED.items()
        for size in SIZES
    ]
    with figures.settings():
        figure = figures.lines(series, "partitions D (cores)", "milliseconds")
        return figures.svg(
            figure,
            "exchanges",
            "Lines over logarithmic axes: milliseconds of AllToAll and AllReduce "
            "against the number of partitions; the table below has the same figures.",
        )


def collective_table() -> Element:
    """The figures of `exchanges`."""
    columns = [Column("D"), Column("slice", words=True)]
    columns += [Column(f"{size} MiB", "[m]", f"{name}, ms") for name in _COMPARED for size in SIZES]
    rows = [
        [
            f"{count}",
            v3_slice(count),
            *(f"{1e3 * collective_seconds(kind, count, size):.3f}" for kind in _COMPARED.values() for size in SIZES),
        ]
        for count in PARTITIONS
    ]
    growth = [f"{collective_growth(kind):.1f} ×" for kind in _COMPARED.values() for _ in SIZES]
    rows.append([f"{PARTITIONS[0]} to {PARTITIONS[-1]}", "", *growth])
    rows.append(["paper: GShard section 5.3", "", "9 ×", "9 ×", "O(1)", "O(1)"])
    return table(("Time of one exchange among all cores of the squarest TPU v3 slice, and its growth.",), columns, rows)


def figure(drawing: Element, *caption) -> Element:
    """A drawing with its caption."""
    return element(
        "figure",
        element(
            "div", drawing, class_="scroll", tabindex="0", role="region", aria_label="figure, can be scrolled sideways"
        ),
        element("figcaption", *caption),
    )
