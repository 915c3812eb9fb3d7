"""How the project's figures look: colours, matplotlib's settings, and SVG that is the same for the same figure."""

from __future__ import annotations

import io

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

# After Okabe and Ito, and greys of different lightness: distinct to colour-blind readers.
BLUE, SKY, GREEN, YELLOW = "#0072b2", "#56b4e9", "#009e73", "#f0e442"
ORANGE, VERMILLION, PURPLE, VIOLET = "#e69f00", "#d55e00", "#cc79a7", "#6a3d9a"
GREY, LIGHT, DARK, MUTED = "#a3abb5", "#ccd1d8", "#76808d", "#5a6472"
SETTINGS = {
    "svg.hashsalt": "lingvo_moe",  # the same figure has the same bytes
    "svg.fonttype": "none",
    "font.size": 8.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#dedad0",
    "legend.frameon": False,
}
WIDTH = 7.2  # inches


def svg(figure: Figure) -> bytes:
    """Returns a figure as SVG; the same figure gives the same bytes."""
    written = io.BytesIO()
    with matplotlib.rc_context(SETTINGS):
        FigureCanvasSVG(figure).print_svg(written, metadata={"Date": None, "Creator": None})
    return written.getvalue()
