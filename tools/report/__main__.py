"""One HTML page of the plans of the zoo, set beside what the papers publish of the same models.

    python -m tools.report [--plans=docs/plans] [--output=docs/report.html]

The plans are those of tools.plan_zoo. A plan that is not there is shown as not planned; the same plans give the same page.
"""

from __future__ import annotations

import os
import pathlib

from absl import flags

from lingvo_moe.cli import app
from lingvo_moe.errors import UserError
from tools.report import charts, markup, published, reading, claims, tables
from tools.report.markup import Element, code, element
from tools.report.reading import EACH_SIDE, GIB, Plans
from tools.report.style import STYLE
from tools.report.tables import change, note, percent

_VALUES = flags.FlagValues()
flags.DEFINE_string("plans", "docs/plans", "directory of plans, NAME.json", flag_values=_VALUES)
flags.DEFINE_string("output", "docs/report.html", "the page", flag_values=_VALUES)

_TITLE = "Giant models, planned and published"
_SECTIONS = (
    ("memory", "Memory"),
    ("time", "Time"),
    ("exchanges", "Exchanges"),
    ("claims", "Claims"),
    ("training", "Training M4"),
    ("language-models", "Language models"),
    ("plans", "The plans"),
)
_MADE_BY = "python -m tools.plan_zoo"
_LEAD = (
    "What the TPU's own compiler says of Mixture-of-Experts and dense models of ten billion weights to four trillion, on the "
    "slices of 32 to 2048 TPU v3 cores that they were made for, beside what the papers measured."
)
_WARNING = (
    "Nothing here was run on a TPU. Each plan is a registered model's real training step, partitioned and compiled at full "
    "scale, so its memory is what a slice would use; its time is an estimate, to be read beside a measured one and not as "
    "one. Every figure names its source:"
)
_SOURCES = (
    ("[paper: table]", "printed in a paper, which measured it on TPUs; shown with the paper's own digits"),
    (
        "[c]",
        "the TPU compiler's: memory of activations and buffers, whether a program fits, cycles; seconds are cycles by "
        "the published clock",
    ),
    ("[p]", "counted from the program: sizes of its inputs, tokens, operations that the model asks for"),
    ("[m]", "our model of the links: time of exchanges at full published bandwidth, one after another, none hidden"),
)


def main(arguments: list[str]):
    """Writes the page."""
    app.no_arguments(arguments[1:])
    plans = reading.load(pathlib.Path(_VALUES.plans))
    output = pathlib.Path(_VALUES.output)
    if not output.name or output.exists() and not output.is_file():
        raise UserError(f"--output={_VALUES.output}: expected the name of a file.")
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f"{output.name}.partial")
    partial.write_bytes(page(plans))
    os.replace(partial, output)
    print(f"{output}: {len(plans)} plans, {len(tables.missing(plans))} of the tables not planned")


def page(plans: Plans) -> bytes:
    """The page as HTML; the same plans give the same bytes."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", _TITLE),
        element("style", STYLE),
    )
    links = (element("li", element("a", name, href=f"#{anchor}")) for anchor, name in _SECTIONS)
    header = element(
        "header",
        element("h1", _TITLE),
        element("p", _LEAD, class_="lead"),
        element("nav", element("ul", *links), aria_label="sections"),
    )
    sections = (_memory, _time, _collectives, _claims, _training, _language_models, _plans)
    contents = element("main", _glance(plans), *_legend(), *(section(plans) for section in sections))
    return markup.write(element("html", head, element("body", header, contents, _papers()), lang="en"))


def _section(title: str, anchor: str, *children) -> Element:
    return element("section", element("h2", title), *children, id=anchor)


def _source(where: str) -> list:
    return [f" After {where}. Plans: ", code(f"{_MADE_BY} --only=m4"), "."]


def _glance(plans: Plans) -> Element:
    """What one would tell of the page in a sentence each; what is not planned is not there."""
    found = []
    trillion = reading.fitting(plans, published.TRILLION.plan)
    if trillion is not None:
        found.append(
            (
                f"{trillion.memory.total / GIB:.1f} GiB",
                f"of a core's {charts.CORE_GIB} for "
                f"{trillion.weights / 1e12:.2f} trillion weights on {trillion.cores} cores [c, p]",
            )
        )
    for few, many in tables.pairs_of_experts():
        ends = [reading.fitting(plans, name) for name in (few.plan, many.plan)]
        if None not in ends and not reading.unlike(*ends):
            found.append(
                (
                    change(ends[1].memory.total, ends[0].memory.total),
                    f"memory of a core from 128 to 2048 experts, {many.model}, with as many tokens on each core [c, p]",
                )
            )
    steps = [(reading.fitting(plans, row.plan), row.step) for row in published.rows() if row.step]
    ratios = sorted(plan.step_seconds / step for plan, step in steps if plan is not None)
    if ratios:
        found.append(
            (
                f"{ratios[0]:.2f} to {ratios[-1]:.2f} ×",
                f"the published step times, over {len(ratios)} models; [c, m] beside [paper]",
            )
        )
    found.append(
        (
            f"{charts.collective_growth('all-to-all'):.0f} ×",
            "the time of AllToAll from 16 to 2048 cores [m]; 9 × [paper: GShard section 5.3]",
        )
    )
    return element(
        "dl", *(element("div", element("dt", text), element("dd", value)) for value, text in found), class_="glance"
    )


def _legend() -> list[Element]:
    parts = (part for name, text in _SOURCES for part in (element("dt", name), element("dd", text)))
    return [
        element("p", _WARNING),
        element("dl", *parts, class_="legend"),
        note("GiB are 2³⁰ bytes. The papers print GB and do not say which they mean; 1 GiB is 1.07 × 10⁹ bytes."),
    ]


def _memory(plans: Plans) -> Element:
    drawing = charts.figure(
        charts.memory(plans),
        "Memory per core of the M4 models [c, p]. Below, 128 and 2048 experts with as many tokens on each core, with 2048 those of "
        "4M on each side; the difference is relative to 128 experts, and not given where the two differ in more. The lines are the "
        "core's memory and, where a plan that does not fit made the compiler say so, what a program may use of it [c].",
        *_source("GShard figure 7, whose values are printed as a picture only"),
    )
    remat = note(
        "Remat says what is kept of the forward pass: ",
        code("full"),
        " keeps the input of each layer, ",
        code("keep_outputs"),
        " the outputs of its blocks as well, ",
        code("keep_hidden"),
        " their hidden tensors as well. What is not kept is computed again.",
        *_source("GShard section 5.1"),
    )
    return _section("Memory of a core", "memory", drawing, tables.memory(plans), remat)


def _time(plans: Plans) -> Element:
    drawing = charts.figure(
        charts.time(plans),
        "A training step by part of the model [c] and kind of exchange [m]. Below each bar its roofline: the model's own "
        "operations at the cores' peak of 61.5 TFLOP/s [p] and the same exchanges [m]. The paper's roofline bounds each operator "
        "by compute, memory or links, and is of one layer's forward pass.",
        *_source("GShard figure 8"),
    )
    return _section(
        "Where a step's time goes", "time", drawing, tables.breakdown(plans), note(*_source("GShard section 5.2"))
    )


def _collectives(plans: Plans) -> Element:
    del plans  # the model of the links alone
    growth, flat = (charts.collective_growth(kind) for kind in ("all-to-all", "all-reduce"))
    drawing = charts.figure(
        charts.collectives(),
        f"AllToAll and AllReduce of 8 and 32 MiB on each core [m]. From 16 to 2048 partitions AllToAll takes {growth:.1f} times as "
        f"long, in the paper 9 times; AllReduce {flat:.1f} times, in the paper it is independent of the number of devices "
        "[paper: GShard section 5.3]. After GShard figure 9. No plan is needed: the times are those of ",
        code("lingvo_moe/analysis/hardware.py"),
        ".",
    )
    return _section("Exchanges against the number of partitions", "exchanges", drawing, charts.collective_table())


def _claims(plans: Plans) -> Element:
    return _section(
        "What the paper says, and the plans",
        "claims",
        claims.claims(plans),
        note(
            "The paper's shares of time are of an MoE layer and the Transformer layer beside it; those of plans are of the whole "
            "training step, with embeddings, softmax, backward pass and optimizer. Memory, times and shares by experts are of the "
            "plans with as many tokens on each core.",
            *_source("GShard section 5"),
        ),
    )


def _training(plans: Plans) -> Element:
    return _section(
        "Training M4 on a trillion tokens",
        "training",
        tables.training(plans),
        note("Core-years are of 10¹² tokens, which is what the paper's days come to.", *_source("GShard table 3")),
        element("h3", "What counts as a batch's tokens"),
        element("p", _reading(plans)),
        tables.readings(plans),
        note(
            "Published speed as a share of the peak: the model's own operations in a step [p], by the published steps "
            "per second [paper: GShard table 3], by cores of 61.5 TFLOP/s.",
            *_source("GShard table 3"),
        ),
    )


def _reading(plans: Plans) -> str:
    """Why both sides together are counted."""
    both, each = (
        [
            reading.implied_utilisation(plans[row.plan + variant], row.steps_per_second)
            for row in published.GSHARD_3.rows
            if row.cores == 128 and row.plan + variant in plans
        ]
        for variant in ("", EACH_SIDE)
    )
    text = (
        "The paper does not say whether a batch of 1M tokens is 1M on each side of the translation or 1M of source and target "
        "together; the registered models count both sides together."
    )
    if each:
        together = f"; together, {_range(both)}" if both else ""
        highest = published.highest_utilisation()
        text += (
            f" With 1M on each side, the published steps per second would need {_range(each)} of the peak of 128 "
            f"cores{together} [paper, p]. GSPMD, of later work and larger matrices, reports {highest.utilisation} % at the "
            f"most [paper: {_table_of(highest)}], so both sides together is the reading used here."
        )
    return text


def _range(shares: list[float]) -> str:
    low, high = percent(min(shares), 0), percent(max(shares), 0)
    return low if low == high else f"{low.removesuffix(' %')} to {high}"


def _table_of(row: published.Row) -> str:
    return next(table.source for table in published.BENCHMARKS if row in table.rows)


def _language_models(plans: Plans) -> Element:
    shown = []
    for table in published.BENCHMARKS:
        families = ",".join(sorted({row.plan.partition(".")[0] for row in table.rows}))
        attempts = (
            (
                " Attempts 1 and 2 are the layouts that the finalized one is compared with in GSPMD table 1; the paper prints "
                "no figures of them."
            )
            if table is published.GSPMD_2
            else None
        )
        shown += [
            element("h3", table.source),
            tables.benchmark(plans, table),
            note(
                f"{table.left_out} After {table.source}. Plans: ", code(f"{_MADE_BY} --only={families}"), ".", attempts
            ),
        ]
    return _section("Language models", "language-models", *shown)


def _plans(plans: Plans) -> Element:
    names = (part for name in tables.missing(plans) for part in (code(name), " "))
    absent = (
        element("p", "Not planned: ", *names, "– ", code(_MADE_BY), " makes them.") if tables.missing(plans) else None
    )
    return _section(
        "The plans",
        "plans",
        tables.origins(plans),
        absent,
        note(
            "A plan takes one to three minutes of one core, and no TPU. ",
            code(_MADE_BY),
            " makes all of them, ",
            code("python -m tools.report"),
            " this page.",
        ),
    )


def _papers() -> Element:
    papers = (element("li", element("strong", name), f": {text}") for name, text in published.PAPERS)
    return element("footer", element("h2", "The papers"), element("ul", *papers))


if __name__ == "__main__":
    app.run(main, _VALUES)
