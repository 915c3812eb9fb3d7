"""The report's figures, drawn with matplotlib and put into the page as SVG that takes the page's colours and font."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Patch

# Drawn in colours that nobody else uses, which the page replaces by its own, light or dark.
INK, MUTED, LINE, PAGE = "#010203", "#040506", "#070809", "#0a0b0c"
_OF_THE_PAGE = {INK: "currentColor", MUTED: "var(--muted)", LINE: "var(--line)", PAGE: "var(--page)"}
# After Okabe and Ito, and greys of different lightness: told apart by colour-blind readers, and on both backgrounds.
BLUE, SKY, GREEN, YELLOW, ORANGE, VERMILLION, PURPLE = (
    "#0072b2",
    "#56b4e9",
    "#009e73",
    "#f0e442",
    "#e69f00",
    "#d55e00",
    "#cc79a7",
)
GREY, LIGHT, DARK = "#a3abb5", "#ccd1d8", "#76808d"
_SETTINGS = {
    "svg.hashsalt": "lingvo_moe",
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 8.0,
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": INK,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
}
_UNDER_TEXT = {"facecolor": PAGE, "edgecolor": "none", "pad": 1.0}  # hides the lines behind it
_WIDTH = 6.6  # inches
_NARROWEST_LABEL = 0.085  # of the axis
_SVG, _LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
_REFERENCE = re.compile(r"(?:^|url\()#([\w-]+)")
_FONT = re.compile(r"font-family: [^;]*;? ?")

Bar = tuple[str, Mapping[str, float], str]  # its label, values by name, and what stands behind its end


def settings():
    """The context that figures are drawn and saved in: the same input gives the same bytes."""
    return matplotlib.rc_context(_SETTINGS)


def stacked(
    groups: Sequence[tuple[str, Sequence[Bar]]],
    colours: Mapping[str, str],
    axis: str,
    marks: Sequence[tuple[float, str]] = (),
    thin: str = "",
) -> Figure:
    """Horizontal stacked bars.

    Args:
      groups: bars under headings.
      colours: by the names of the values, in the order of the stack.
      axis: what the axis shows, and its unit.
      marks: places on the axis with a vertical line, and what they are.
      thin: bars of this label are drawn thinner, close below the one before.
    """
    bars = sum(len(members) for _, members in groups)
    rows = sum(0.62 if label == thin else 1 for _, members in groups for label, _, _ in members) + 0.9 * len(groups)
    figure = Figure(figsize=(_WIDTH, 0.95 + 0.27 * rows + 0.16 * (len(colours) // 4)), layout="constrained")
    axes = figure.add_subplot()
    longest = max([sum(values.values()) for _, members in groups for _, values, _ in members] + [at for at, _ in marks])
    axes.set_xlim(0, (longest or 1) * 1.3)
    places, labels = _draw_groups(axes, groups, colours, thin)
    axes.set_ylim(places[-1] + 0.7, -1.0) if bars else None
    axes.set_yticks(places, labels)
    for tick, label in zip(axes.get_yticklabels(), labels):
        tick.set_color(MUTED if label == thin else INK)
    for index, (at, name) in enumerate(marks):
        axes.axvline(
            at, color=VERMILLION if index else INK, linewidth=0.9, linestyle="-" if index == 0 else (0, (3, 2))
        )
        axes.annotate(
            name,
            (at, -1.05),
            xytext=(-2 if index else 2, 0),
            textcoords="offset points",
            ha="right" if index else "left",
            va="bottom",
            fontsize=7,
            annotation_clip=False,
        )
    axes.set_xlabel(axis)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    figure.legend(
        handles=[Patch(color=colour, label=name) for name, colour in colours.items()],
        loc="outside upper left",
        ncols=4,
        handlelength=1.1,
        handleheight=0.9,
        columnspacing=1.4,
        fontsize=7.5,
    )
    return figure


def _draw_groups(axes: Axes, groups, colours: Mapping[str, str], thin: str) -> tuple[list[float], list[str]]:
    """Where the bars are, and their labels."""
    at, places, labels = -0.4, [], []
    for heading, members in groups:
        axes.annotate(
            heading,
            (0, at),
            xytext=(5, 0),
            textcoords="offset points",
            fontweight="bold",
            va="center",
            ha="left",
            bbox=_UNDER_TEXT,
        )
        at += 0.9
        for label, values, end in members:
            if label == thin:
                at -= 0.3
            _draw_bar(axes, at, values, end, colours, 0.34 if label == thin else 0.62)
            places.append(at)
            labels.append(label)
            at += 0.92 if label == thin else 1
    return places, labels


def _draw_bar(axes: Axes, at: float, values: Mapping[str, float], end: str, colours: Mapping[str, str], height: float):
    left, width = 0.0, axes.get_xlim()[1]
    for name, colour in colours.items():
        value = values.get(name, 0.0)
        if value:
            axes.barh(at, value, height, left=left, color=colour, edgecolor=PAGE, linewidth=0.5)
        if value > _NARROWEST_LABEL * width and height > 0.5:
            axes.text(left + value / 2, at, f"{value:.2f}", ha="center", va="center", fontsize=6.5, color=_on(colour))
        left += value
    axes.annotate(
        end,
        (left, at),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        ha="left",
        fontsize=7,
        color=MUTED if height < 0.5 else INK,
        bbox=_UNDER_TEXT,
    )


def _on(colour: str) -> str:
    """Black or white, whichever is read better on a colour."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#ffffff" if 0.299 * red + 0.587 * green + 0.114 * blue < 128 else "#15181c"


def lines(
    series: Sequence[tuple[str, Sequence[float], Sequence[float], str, bool]], across: str, upward: str
) -> Figure:
    """Lines over logarithmic axes, each with its name behind its last point.

    Args:
      series: name, values across, values upward, colour, whether dashed.
      across, upward: what the axes show, and the unit.
    """
    figure = Figure(figsize=(_WIDTH, 3.5), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for name, x, y, colour, dashed in series:
        axes.plot(
            x, y, color=colour, linewidth=1.6, linestyle=(0, (4, 2)) if dashed else "-", marker="o", markersize=3.2
        )
        axes.annotate(name, (x[-1], y[-1]), xytext=(7, 0), textcoords="offset points", va="center", fontsize=7.5)
    x = series[0][1]
    axes.set_xlim(x[0] / 1.25, x[-1] * 9)
    axes.set_xticks(x, [f"{value:g}" for value in x])
    low, high = min(min(y) for _, _, y, _, _ in series), max(max(y) for _, _, y, _, _ in series)
    ticks = [value for value in (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100) if low / 2 <= value <= high * 2]
    axes.set_yticks(ticks, [f"{value:g}" for value in ticks])
    axes.minorticks_off()
    axes.set_xlabel(across)
    axes.set_ylabel(upward)
    axes.grid(axis="y")
    return figure


def svg(figure: Figure, name: str, description: str) -> Element:
    """A figure as an element of the page.

    Args:
      figure: drawn within `settings`.
      name: another one for every figure of a page; its parts are called after it.
      description: for those who cannot see it.
    """
    written = io.StringIO()
    FigureCanvasSVG(figure).print_svg(written, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    root = ElementTree.fromstring(written.getvalue())
    for parent in list(root.iter()):
        for child in [child for child in parent if child.tag == f"{_SVG}style" or child.tag.endswith("}metadata")]:
            parent.remove(child)
    used = {found for part in root.iter() for value in part.attrib.values() for found in _REFERENCE.findall(value)}
    for part in root.iter():
        part.tag = part.tag.removeprefix(_SVG)
        part.attrib = dict(_attributes(part, used, name))
    root.attrib = {"viewBox": root.get("viewBox"), "role": "img", "aria-label": description}
    return root


def _attributes(part: Element, used: set[str], name: str):
    """Of a part of a figure, as they are in the page: parts that are referred to have names of this figure alone."""
    for key, value in part.attrib.items():
        if key == "id":
            if value in used:
                yield key, f"{name}-{value}"
        elif key == _LINK:
            yield "href", value.replace("#", f"#{name}-")
        else:
            value = value.replace("url(#", f"url(#{name}-")
            for colour, of_the_page in _OF_THE_PAGE.items():
                value = value.replace(colour, of_the_page)
            yield key, _FONT.sub("", value)
