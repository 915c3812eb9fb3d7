"""Writes one HTML page of the plans of the zoo, beside what the papers publish of the same models.

    python -m tools.report [--plans=docs/plans] [--output=build/report.html] [--figures=DIRECTORY] [--planning=FILE]

The plans are those of tools.plan_zoo; a missing one is shown as not planned. The page needs no other file, and the
same plans give the same page.
"""

from __future__ import annotations

import base64
import functools
import pathlib
from collections.abc import Sequence

import jinja2
from absl import flags
from markupsafe import Markup
from matplotlib.figure import Figure

from lingvo_moe.cli import app
from lingvo_moe.errors import UserError
from lingvo_moe.utils import output_directories, output_files
from lingvo_moe.utils.counts import counted
from tools import markdown
from tools.report import charts, claims, clusters, layers, links, measured, published, searches, style, tables
from tools.report import plans as of_plans
from tools.report.layers import LayerPair
from tools.report.measured import Measured
from tools.report.plans import BOTH_SIDES, GIB, Plans
from tools.report.searches import LayoutSearch
from tools.report.tables import change, percent

_VALUES = flags.FlagValues()
flags.DEFINE_string("plans", "docs/plans", "directory of plans, NAME.json", flag_values=_VALUES)
flags.DEFINE_string(
    "layer_pairs",
    "docs/layer_pairs.json",
    "the results of tools.partitioning.layer_pairs; empty for none",
    flag_values=_VALUES,
)
flags.DEFINE_string(
    "collective_times",
    "docs/collective_times.json",
    "the results of tools.partitioning.collective_times; empty for none",
    flag_values=_VALUES,
)
flags.DEFINE_string(
    "layout_searches",
    "docs/layout_searches.json",
    "the results of tools.partitioning.layout_searches; empty for none",
    flag_values=_VALUES,
)
flags.DEFINE_string("output", "build/report.html", "file of the page", flag_values=_VALUES)
flags.DEFINE_string("figures", None, "also write the figures to this directory, as SVG", flag_values=_VALUES)
flags.DEFINE_string("planning", None, "also write tables into this page, docs/planning.md", flag_values=_VALUES)


def main(arguments: list[str]):
    """Writes the page, and the figures and tables if asked for; checks everything before the first is written."""
    app.no_arguments(arguments[1:])
    plans = of_plans.load(pathlib.Path(_VALUES.plans))
    output = pathlib.Path(_VALUES.output)
    if not output.name or (output.exists() and not output.is_file()):
        raise UserError(f"--output={_VALUES.output}: expected the name of a file.")
    output_directories.check_path("--figures", _VALUES.figures)
    pairs = layers.load(pathlib.Path(_VALUES.layer_pairs)) if _VALUES.layer_pairs else []
    times = measured.load(pathlib.Path(_VALUES.collective_times)) if _VALUES.collective_times else None
    found = searches.load(pathlib.Path(_VALUES.layout_searches)) if _VALUES.layout_searches else []
    texts = _tables(plans, times, found) if _VALUES.planning else {}
    if _VALUES.planning:
        markdown.check("--planning", _VALUES.planning, *texts)
    _write(output, page(plans, pairs, times, found))
    if _VALUES.figures:
        for name, figure in figures(plans, pairs, times).items():
            _write(pathlib.Path(_VALUES.figures, f"{name}.svg"), style.svg(figure))
    for name, text in texts.items():
        markdown.replace(pathlib.Path(_VALUES.planning), name, text)
    print(f"{output}: {counted(len(plans), 'plan')}, {len(tables.missing(plans))} of the tables not planned")


def _tables(plans: Plans, times: Measured | None, found: Sequence[LayoutSearch]) -> dict[str, str]:
    """Returns the tables of --planning as Markdown, by the names of their markers."""
    texts = clusters.texts(plans)
    if times is not None:
        texts["collective_times"] = clusters.text(measured.table(times))
    if found:
        texts["searches"] = clusters.text(searches.table(found, plans))
    return texts


def _write(path: pathlib.Path, content: bytes):
    path.parent.mkdir(parents=True, exist_ok=True)
    with output_files.atomic_path(path) as partial:
        partial.write_bytes(content)


def figures(plans: Plans, pairs: Sequence[LayerPair], times: Measured | None = None) -> dict[str, Figure]:
    """Returns the figures by name."""
    optional = {"layers": charts.layer_pairs(pairs)} if pairs else {}
    if times is not None:
        optional["collective_times"] = charts.measured_collectives(times)
    return optional | {
        "memory": charts.memory(plans),
        "time": charts.time(plans),
        "collectives": charts.collectives(),
        "pipelines": charts.pipelines(plans),
    }


def page(
    plans: Plans, pairs: Sequence[LayerPair] = (), times: Measured | None = None, found: Sequence[LayoutSearch] = ()
) -> bytes:
    """Returns the page as HTML; the same plans, pairs of layers, measured times and searches give the same bytes."""
    text = (
        _environment()
        .get_template("report.html")
        .render(
            images={name: _data_url(figure) for name, figure in figures(plans, pairs, times).items()},
            highlights=_highlights(plans),
            memory=tables.memory(plans),
            breakdown=tables.breakdown(plans),
            collectives=tables.collectives(),
            growth={name: f"{links.growth(kind):.1f}" for name, kind in links.KINDS.items()},
            measured=times and measured.table(times),
            measured_growth=times and measured.growth(times),
            claims=claims.claims(plans, pairs),
            layers=layers.table(pairs),
            training=tables.training(plans),
            token_counts=tables.token_counts(plans),
            utilisations={variant: _utilisations(plans, variant) for variant in ("", BOTH_SIDES)},
            highest=published.highest_utilisation(),
            benchmarks=[(table, tables.benchmark(plans, table)) for table in published.BENCHMARKS],
            attempts_of=published.GSPMD_2,
            pipelines=published.GSPMD_4,
            clusters=clusters.table(plans),
            meshes=clusters.meshes(plans),
            searches=searches.table(found, plans),
            commands=tables.commands(plans),
            missing=tables.missing(plans),
            papers=published.PAPERS,
        )
    )
    return text.encode("utf-8", "xmlcharrefreplace")


@functools.cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _data_url(figure: Figure) -> Markup:
    return Markup("data:image/svg+xml;base64," + base64.b64encode(style.svg(figure)).decode())


def _highlights(plans: Plans) -> list[tuple[str, str]]:
    """Returns the main figures and their meanings; those of missing plans are left out."""
    found = []
    trillion = of_plans.fitting(plans, published.TRILLION.plan)
    if trillion is not None:
        weights = f"{trillion.weights / 1e12:.2f} trillion weights on {trillion.devices} cores"
        text = f"of a core's {charts.CORE_GIB} for {weights} [c, p]"
        found.append((f"{trillion.memory.total / GIB:.1f} GiB", text))
    for few, many in tables.pairs_of_experts():
        pair = of_plans.fitting(plans, few.plan), of_plans.fitting(plans, many.plan)
        if pair[0] is not None and pair[1] is not None and not of_plans.differences(pair[0], pair[1]):
            text = f"memory of a core from 128 to 2048 experts, {many.model}, with equal tokens per core [c, p]"
            found.append((change(pair[1].memory.total, pair[0].memory.total), text))
    steps = [(of_plans.fitting(plans, row.plan), row.step) for row in published.rows()]
    ratios = sorted(of_plans.step_seconds(plan) / step for plan, step in steps if plan is not None and step)
    if ratios:
        text = f"the published step times, over {len(ratios)} models; [c, m] beside [paper]"
        found.append((f"{ratios[0]:.2f} to {ratios[-1]:.2f} ×", text))
    text = "the time of AllToAll from 16 to 2048 cores [m]; 9 × [paper: GShard section 5.3]"
    return [*found, (f"{links.growth('all-to-all'):.0f} ×", text)]


def _utilisations(plans: Plans, variant: str) -> str | None:
    """Returns the range of the utilisations that the published speeds of 128 cores imply; None without a plan."""
    shares = [
        of_plans.implied_utilisation(plans[row.plan + variant], row.steps_per_second)
        for row in published.GSHARD_3.rows
        if row.cores == 128 and row.plan + variant in plans and row.steps_per_second
    ]
    if not shares:
        return None
    low, high = percent(min(shares), 0), percent(max(shares), 0)
    return low if low == high else f"{low.removesuffix(' %')} to {high}"


if __name__ == "__main__":
    app.run(main, _VALUES)
