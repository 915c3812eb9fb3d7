"""The report's figures, after GShard's figures 7, 8 and 9 and GSPMD's table 4, drawn with matplotlib."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lingvo_moe.analysis.plan import Plan
from tools.report import layers, links, measured, published
from tools.report import plans as of_plans
from tools.report.layers import LayerPair
from tools.report.measured import Measured
from tools.report.plans import GIB, Plans
from tools.report.style import (
    BLUE,
    DARK,
    GREEN,
    GREY,
    LIGHT,
    MUTED,
    ORANGE,
    PURPLE,
    SETTINGS,
    SKY,
    VERMILLION,
    VIOLET,
    WIDTH,
    YELLOW,
)
from tools.report.tables import M4, change, gib, pairs_of_experts, percent, seconds

CORE_GIB = 16  # memory of a TPU v3 core (Jouppi et al. 2020, table 1)
_MEMORY = {
    "replicated weights": BLUE,
    "distributed weights": ORANGE,
    "optimizer state": PURPLE,
    "activations, inputs, buffers": SKY,
}
_AT_PEAK, _ROOFLINE = "the model's own operations at the peak", "at the peak"
_TIME = {
    _AT_PEAK: "#5f7ea8",
    **dict(zip(of_plans.PARTS, (BLUE, SKY, GREEN, VIOLET, YELLOW, GREY, DARK, LIGHT))),
    **dict(zip(of_plans.COLLECTIVES, (VERMILLION, PURPLE, ORANGE))),
}
_LAYERS = dict(zip((*layers.GROUPS, *layers.COLLECTIVES), (BLUE, SKY, GREEN, VIOLET, LIGHT, VERMILLION, PURPLE)))
_PIPELINE = {"compute": BLUE, "bubbles": YELLOW, "collectives": VERMILLION}
_NARROWEST_LABEL = 0.085  # of the axis
_BEHIND_TEXT = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}  # hides grid lines


@dataclasses.dataclass(frozen=True)
class Bar:
    """A horizontal stacked bar: its label, values by name, the text behind its end, and whether it is drawn thinner."""

    label: str
    values: Mapping[str, float]
    end: str
    thin: bool = False


def memory(plans: Plans) -> Figure:
    """GShard figure 7, and pairs with equal tokens per core."""
    marks: list[tuple[float, str]] = [(CORE_GIB, f"{CORE_GIB} GiB")]
    if (available := of_plans.available_memory(plans)) is not None:
        marks.append((available / GIB, f"{gib(available)} available"))
    pairs = [
        bar
        for few, many in pairs_of_experts()
        for bar in (_memory_bar(plans, few.plan, few.model), _memory_bar(plans, many.plan, many.model, beside=few.plan))
    ]
    published = [_memory_bar(plans, row.plan, row.model) for row in M4]
    groups = {"as published": published, "with equal tokens per core": pairs}
    return stacked(groups, _MEMORY, "GiB per core", marks)


def _memory_bar(plans: Plans, name: str, label: str, beside: str = "") -> Bar:
    plan = plans.get(name)
    if plan is None:
        return Bar(label, {}, "not planned")
    m = plan.memory
    rest = m.inputs + (m.temporaries or 0) if plan.fits else 0
    sizes = (m.replicated_weights, m.distributed_weights, m.optimizer_state, rest)
    end = gib(m.total) if plan.fits else f"and more: does not fit, needs {gib(m.needed)}"
    other = of_plans.fitting(plans, beside)
    if plan.fits and other is not None and not of_plans.differences(other, plan):
        end += f", {change(m.total, other.memory.total)}"
    return Bar(label, {kind: size / GIB for kind, size in zip(_MEMORY, sizes)}, end)


def layer_pairs(pairs: Sequence[LayerPair]) -> Figure:
    """GShard figure 8: the forward pass of an MoE layer and the Transformer layer beside it, above its roofline."""
    bars = []
    for pair in pairs:
        values, bound = pair.values(is_roofline=False), pair.values(is_roofline=True)
        share = f"{1e3 * pair.roofline_seconds:.1f} ms, {percent(pair.roofline_seconds / pair.seconds, 0)}"
        bars += [
            Bar(f"{pair.experts} experts", _milliseconds(values), f"{1e3 * pair.seconds:.1f} ms"),
            Bar("roofline", _milliseconds(bound), share, thin=True),
        ]
    tokens = " and ".join(dict.fromkeys(f"{pair.tokens // pair.cores:,}" for pair in pairs))
    return stacked({f"{tokens} tokens per core": bars}, _LAYERS, "milliseconds of the forward pass")


def _milliseconds(values: Mapping[str, float]) -> dict[str, float]:
    return {name: 1e3 * value for name, value in values.items()}


def time(plans: Plans) -> Figure:
    """A training step by part of the model and kind of collective, above the model's own operations at the peak."""
    groups = {
        f"{layers} layers": [
            bar for row in M4 if f" {layers}L" in row.model for bar in _time_bars(plans.get(row.plan), row.model)
        ]
        for layers in (12, 36, 60)
    }
    return stacked(groups, _TIME, "seconds of one training step")


def _time_bars(plan: Plan | None, label: str) -> list[Bar]:
    if plan is None or not plan.fits:
        return [Bar(label, {}, "not planned" if plan is None else "does not fit")]
    collectives, at_peak = of_plans.collectives_by_kind(plan), of_plans.at_peak_seconds(plan)
    step, share = of_plans.step_seconds(plan), of_plans.all_to_all_share(plan)
    return [
        Bar(
            label,
            of_plans.compute_by_part(plan) | collectives,
            f"{seconds(step)} s, AllToAll {percent(share, 0)}",
        ),
        Bar(
            _ROOFLINE,
            {_AT_PEAK: of_plans.peak_seconds(plan)} | collectives,
            f"{seconds(at_peak)} s, {percent(at_peak / step, 0)} of the step",
            thin=True,
        ),
    ]


def pipelines(plans: Plans) -> Figure:
    """GSPMD table 4, in seconds of 1024 sequences, beside the plan of 2D sharding that the paper compares it with."""
    rows = [*published.GSPMD_4.rows, next(row for row in published.GSPMD_3.rows if row.mesh == "(32,8)")]
    bars = [_pipeline_bar(plans.get(row.plan), f"{row.mesh}, {row.batch}") for row in rows]
    groups = {"stages, data, in-layer": bars[:-1], "no pipeline": bars[-1:]}
    return stacked(groups, _PIPELINE, "seconds of 1024 sequences")


def _pipeline_bar(plan: Plan | None, label: str) -> Bar:
    if plan is None or not plan.fits:
        return Bar(label, {}, "not planned" if plan is None else "does not fit")
    scale = 1024 / plan.batch_size
    compute = sum(of_plans.compute_by_part(plan).values()) * scale
    bubbles = compute * of_plans.bubble_share(plan)
    step, recomputed = of_plans.step_seconds(plan) * scale, percent(of_plans.rematerialised_share(plan), 0)
    values = (compute - bubbles, bubbles, plan.collective_seconds * scale)
    return Bar(label, dict(zip(_PIPELINE, values)), f"{seconds(step)} s, {recomputed} recomputed")


def collectives() -> Figure:
    """GShard figure 9, modelled: the time of a collective against the number of partitions, on logarithmic axes."""
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(WIDTH, 3.5), layout="constrained")
        axes = figure.add_subplot()
        for name, kind in links.KINDS.items():
            for size, style in zip(links.SIZES, ("--", "-")):
                times = [links.milliseconds(kind, count, size) for count in links.PARTITIONS]
                colour = VERMILLION if name == "AllToAll" else BLUE
                axes.plot(links.PARTITIONS, times, style, color=colour, marker="o", markersize=3)
                label = f"{name}, {size} MiB"
                at = (links.PARTITIONS[-1], times[-1])
                axes.annotate(label, at, xytext=(7, 0), textcoords="offset points", va="center")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlim(links.PARTITIONS[0] / 1.25, links.PARTITIONS[-1] * 9)
        axes.set_xticks(links.PARTITIONS, [str(count) for count in links.PARTITIONS])
        axes.set_yticks(ticks := [0.03, 0.1, 0.3, 1, 3], [f"{value:g}" for value in ticks])
        axes.minorticks_off()
        axes.set_xlabel("partitions D (cores)")
        axes.set_ylabel("milliseconds, modelled")
        axes.grid(axis="y")
    return figure


def measured_collectives(times: Measured) -> Figure:
    """GShard figure 9, measured among virtual devices; dotted lines have a process for each device."""
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
        for axes, size in zip(figure.subplots(1, len(measured.SIZES), sharey=True), measured.SIZES):
            for name, colour in zip(measured.OPERATIONS, (BLUE, VERMILLION, DARK)):
                for in_one_process, style in ((True, "-"), (False, ":")):
                    found = measured.series(times, name, size, in_one_process)
                    points = [time.devices for time in found], [1e3 * time.cpu_seconds for time in found]
                    label = name if in_one_process else f"{name}, a process for each device"
                    axes.plot(*points, style, color=colour, marker="o", markersize=3, label=label)
            ticks = sorted({devices for _, devices in times.shapes})
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(ticks, [str(count) for count in ticks])
            axes.set_xlabel("virtual devices D")
            axes.set_title(f"{size} MiB on each device", fontsize=8)
            axes.grid(axis="y")
        figure.axes[0].set_ylabel("milliseconds of CPU time, measured")
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=3, fontsize=7.5)
    return figure


def stacked(
    groups: Mapping[str, Sequence[Bar]],
    colours: Mapping[str, str],
    axis: str,
    marks: Sequence[tuple[float, str]] = (),
) -> Figure:
    """Draws horizontal stacked bars.

    Args:
      groups: bars by heading.
      colours: by the names of the values, in the order of the stack.
      axis: what the axis shows, and its unit.
      marks: values with a vertical line, and their labels.
    """
    bars = [bar for members in groups.values() for bar in members]
    height = sum(0.62 if bar.thin else 1 for bar in bars) + 0.9 * len(groups)
    longest = max([sum(bar.values.values()) for bar in bars] + [value for value, _ in marks], default=0) or 1
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(WIDTH, 0.95 + 0.27 * height + 0.16 * (len(colours) // 4)), layout="constrained")
        axes = figure.add_subplot()
        axes.set_xlim(0, longest * 1.3)
        _draw_groups(axes, groups, colours)
        for (value, label), style, side in zip(marks, ("-", "--"), ("left", "right")):
            axes.axvline(value, color=VERMILLION if side == "right" else "black", linewidth=0.9, linestyle=style)
            axes.annotate(label, (value, -1.05), ha=side, va="bottom", fontsize=7, annotation_clip=False)
        axes.set_xlabel(axis)
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
        handles = [Patch(color=colour, label=name) for name, colour in colours.items()]
        figure.legend(handles=handles, loc="outside upper left", ncols=4, handlelength=1.1, fontsize=7.5)
    return figure


def _draw_groups(axes: Axes, groups: Mapping[str, Sequence[Bar]], colours: Mapping[str, str]):
    y, ticks = -0.4, {}
    for heading, bars in groups.items():
        _write(axes, 0, y, heading, fontweight="bold")
        y += 0.9
        for bar in bars:
            y -= 0.3 * bar.thin
            _draw_bar(axes, y, bar, colours)
            ticks[y] = bar.label
            y += 0.92 if bar.thin else 1
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.set_ylim(y - 0.3, -1.0)


def _draw_bar(axes: Axes, y: float, bar: Bar, colours: Mapping[str, str]):
    left, narrowest = 0.0, _NARROWEST_LABEL * axes.get_xlim()[1]
    for name, value in ((name, bar.values.get(name, 0.0)) for name in colours):
        if value:
            height = 0.34 if bar.thin else 0.62
            axes.barh(y, value, height, left=left, color=colours[name], edgecolor="white", linewidth=0.5)
        if value > narrowest and not bar.thin:
            colour = _contrast(colours[name])
            axes.text(left + value / 2, y, f"{value:.2f}", ha="center", va="center", fontsize=6.5, color=colour)
        left += value
    _write(axes, left, y, bar.end, fontsize=7, color=MUTED if bar.thin else "black")


def _write(axes: Axes, x: float, y: float, text: str, **style):
    axes.annotate(text, (x, y), xytext=(5, 0), textcoords="offset points", va="center", bbox=_BEHIND_TEXT, **style)


def _contrast(colour: str) -> str:
    """Returns black or white, whichever is read better on a colour."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 128 else "black"
