"""The report's tables: what the papers print beside what the plans say, row by row."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from xml.etree.ElementTree import Element

from lingvo_moe.analysis.plan import Plan
from lingvo_moe.engines.topology import v3_slice
from tools.report import published, reading
from tools.report.markup import Cell, Child, Column, Span, code, element, table
from tools.report.published import Row, Table
from tools.report.reading import GIB, TRILLION_TOKENS, Plans

# By layers, then by experts.
M4 = (*published.GSHARD_3.rows[5::-2], *published.GSHARD_3.rows[4::-2], published.TRILLION)
_NONE = "–"


def pairs_of_experts() -> list[tuple[published.Row, published.Row]]:
    """M4's rows of 128 and of 2048 experts with as many layers, of the plans with as many tokens on each core.

    With 2048 experts those have 4M tokens on each side: an expert's capacity for a group is one token there, and with fewer it
    would be rounded up to one.
    """
    by_name = {row.plan: row for row in M4}
    return [
        (
            dataclasses.replace(by_name[few], plan=few + reading.TOKENS_PER_CORE),
            dataclasses.replace(by_name[many], plan=many + reading.EACH_SIDE),
        )
        for few, many in ((f"m4.MoE128E{layers}L", f"m4.MoE2048E{layers}L") for layers in (12, 36))
    ]


def gib(size: float | None) -> str:
    """Bytes as GiB with two digits."""
    return _NONE if size is None else f"{size / GIB:.2f}"


def percent(share: float | None, digits: int = 1) -> str:
    """A share of one."""
    return _NONE if share is None else f"{share * 100:.{digits}f} %"


def change(new: float, old: float) -> str:
    """What is more or less than before, as a share of that."""
    return f"{(new / old - 1) * 100:+.1f} %"


def times(ours: float | None, paper: float | None) -> str:
    """How many times as much as the paper's."""
    return _NONE if ours is None or paper is None else f"{ours / paper:.2f} ×"


def seconds(value: float | None) -> str:
    """Seconds with three digits or more."""
    return _NONE if value is None else f"{value:.3f}" if value < 1 else f"{value:.2f}"


def not_planned(name: str, columns: int) -> Span:
    """In place of the figures of a plan that is not there."""
    return Span(columns, ("not planned: ", code(reading.command_to_make(name))))


def does_not_fit(plan: Plan, columns: int) -> Span:
    """In place of the figures of a plan that does not fit: the compiler's answer."""
    return Span(
        columns,
        (
            element("strong", "does not fit: "),
            f"needs {gib(plan.memory.needed)} of {gib(plan.memory.available)} GiB [c]",
        ),
    )


def _printed(value: str | None, unit: str = "") -> str:
    return _NONE if value is None else f"{value}{unit}"


def _cells(plans: Plans, name: str, columns: int, known: Sequence[str], figures) -> list[Cell]:
    """A plan's cells: `figures` of one that fits; of another the `known` ones, or none, and why."""
    plan = plans.get(name)
    if plan is None:
        return [not_planned(name, columns)]
    known = [str(getattr(plan, attribute)) for attribute in known]
    if not plan.fits:
        return [*known, does_not_fit(plan, columns - len(known))]
    return [*known, *figures(plan)]


def memory(plans: Plans) -> Element:
    """GShard figure 7's kinds of memory, for each M4 model and the variants that it is compared with."""
    columns = [
        Column("model"),
        Column("cores", "[p]"),
        Column("tokens per core", "[p]"),
        Column("remat", words=True),
        Column("replicated weights", "[p]", "GiB per core"),
        Column("distributed weights", "[p]", "GiB per core"),
        Column("optimizer state", "[p]", "GiB per core"),
        Column("inputs", "[p]", "GiB per core"),
        Column("activations, buffers", "[c]", "GiB per core"),
        Column("together", "[c, p]", "GiB per core"),
    ]
    rows = [(row.model, row.plan) for row in (*M4, published.GSHARD_3.rows[-1])]
    rows += [(f"{row.model}, as many tokens", row.plan) for pair in pairs_of_experts() for row in pair]
    rows.append(
        (f"{published.TRILLION.model}, all dense weights replicated", published.TRILLION.plan + reading.REPLICATED)
    )
    return table(
        ("Memory of one core, by what it holds: the figures of the chart above.",),
        columns,
        [[label, *_memory_cells(plans, name)] for label, name in rows],
    )


def _memory_cells(plans: Plans, name: str) -> list[Cell]:
    plan = plans.get(name)
    if plan is None:
        return [not_planned(name, 9)]
    of = plan.memory
    known = [
        f"{plan.cores}",
        f"{plan.tokens / plan.cores:,.0f}",
        plan.remat,
        *map(gib, (of.replicated_weights, of.distributed_weights, of.optimizer_state, of.inputs)),
    ]
    return [*known, *([gib(of.temporaries), gib(of.total)] if plan.fits else [does_not_fit(plan, 2)])]


def breakdown(plans: Plans) -> Element:
    """Where an M4 model's step goes, and how near it is to its roofline."""
    columns = [
        Column("model"),
        Column("compute", "[c]", "seconds of a step"),
        Column("AllToAll", "[m]", "seconds of a step"),
        Column("AllReduce", "[m]", "seconds of a step"),
        Column("other exchanges", "[m]", "seconds of a step"),
        Column("together", "[c, m]", "seconds of a step"),
        Column("share of AllToAll", "[c, m]"),
        Column("roofline, s", "[p, m]"),
        Column("roofline of step", "[c, p, m]"),
        Column("recomputed", "[c]"),
    ]

    def figures(plan: Plan) -> list[Cell]:
        collectives = reading.collectives_by_kind(plan)
        roofline = reading.roofline_seconds(plan)
        return [
            seconds(plan.compute_seconds),
            *map(seconds, collectives.values()),
            seconds(plan.step_seconds),
            percent(collectives["AllToAll"] / plan.step_seconds),
            seconds(roofline),
            percent(roofline / plan.step_seconds),
            percent(plan.rematerialised_cycles / plan.cycles),
        ]

    return table(
        (
            "Time of one training step: the figures of the chart above. “Recomputed” is the share of cycles that compute "
            "activations a second time.",
        ),
        columns,
        [[row.model, *_cells(plans, row.plan, 9, (), figures)] for row in M4],
    )


def training(plans: Plans) -> Element:
    """GShard table 3."""
    paper = f"paper: {published.GSHARD_3.source}"
    columns = [
        Column("model"),
        Column("cores", group=paper),
        Column("batch tokens", group=paper),
        Column("steps/s", group=paper),
        Column("step, s", "1 / (steps/s)", paper),
        Column("core-years", group=paper),
        Column("days", group=paper),
        Column("remat", group="here", words=True),
        Column("memory, GiB", "[c, p]", "here"),
        Column("step, s", "[c, m]", "here"),
        Column("here / paper", group="here"),
        Column("core-years", "[c, m]", "here"),
        Column("of peak", "[c, p, m]", "here"),
    ]
    rows = [
        [
            row.model,
            f"{row.cores}",
            row.batch,
            _printed(row.steps_per_second),
            seconds(row.step),
            _printed(row.core_years),
            _printed(row.days),
            *_cells(plans, row.plan, 6, ("remat",), lambda plan, row=row: _training_cells(plan, row)),
        ]
        for row in published.GSHARD_3.rows
    ]
    return table((f"{published.GSHARD_3.title}: step time and cost of training on a trillion tokens.",), columns, rows)


def _training_cells(plan: Plan, row: Row) -> list[Cell]:
    return [
        gib(plan.memory.total),
        seconds(plan.step_seconds),
        times(plan.step_seconds, row.step),
        f"{plan.core_years(TRILLION_TOKENS):.1f}",
        percent(plan.utilisation),
    ]


def readings(plans: Plans) -> Element:
    """What a batch's tokens may count: both sides together, or each side."""
    columns = [Column("model"), Column("steps/s", "paper: GShard table 3")]
    for group in ("both sides together", "as many on each side"):
        columns += [
            Column("published speed would be, of peak", "[paper, p]", group),
            Column("step, s", "[c, m]", group),
            Column("here / paper", group=group),
            Column("core-years", "[c, m]", group),
        ]
    rows = [
        [
            row.model,
            row.steps_per_second,
            *_reading_cells(plans, row, row.plan, 1),
            *_reading_cells(plans, row, row.plan + reading.EACH_SIDE, 2),
        ]
        for row in published.GSHARD_3.rows
        if row.steps_per_second
    ]
    return table(
        (
            "Two readings of “batch size (tokens)”: the utilisation that the published steps per second would mean under "
            "each, and the plans of both.",
        ),
        columns,
        rows,
    )


def _reading_cells(plans: Plans, row: Row, name: str, sides: int) -> list[Cell]:
    plan = plans.get(name)
    if plan is None:
        return [not_planned(name, 4)]
    implied = percent(reading.implied_utilisation(plan, row.steps_per_second))
    if not plan.fits:
        return [implied, does_not_fit(plan, 3)]
    years = plan.core_years(sides * TRILLION_TOKENS)
    return [implied, seconds(plan.step_seconds), times(plan.step_seconds, row.step), f"{years:.1f}"]


# Of a benchmark's published values: heading, attribute of `Row`, unit.
_PUBLISHED = (
    ("memory, GB", "memory", ""),
    ("step, s", "seconds", ""),
    ("of peak", "utilisation", " %"),
    ("AllToAll", "all_to_all", " %"),
    ("1000 tokens/s", "kilotokens", ""),
)
# The same of a plan: heading, source, what must be published that it is shown; nothing for what always is.
_PLANNED = (
    ("memory, GiB", "[c, p]", ()),
    ("step, s", "[c, m]", ()),
    ("step, here / paper", "", ("seconds", "kilotokens")),
    ("of peak", "[c, p, m]", ()),
    ("AllToAll", "[c, m]", ("all_to_all",)),
    ("1000 tokens/s", "[c, m]", ("kilotokens",)),
)


def benchmark(plans: Plans, of: Table) -> Element:
    """A table of language models; a model that is planned with other layouts has a row for each."""

    def is_published(*attributes: str) -> bool:
        return any(getattr(row, attribute) for row in of.rows for attribute in attributes)

    paper = f"paper: {of.source}"
    printed = [value for value in _PUBLISHED if is_published(value[1])]
    shown = [not needed or is_published(*needed) for _, _, needed in _PLANNED]
    here = [Column(head, source, "here") for (head, source, _), is_shown in zip(_PLANNED, shown) if is_shown]
    columns = [
        Column("weights"),
        Column("mesh", group=paper),
        Column("batch", group=paper),
        *(Column(head, group=paper) for head, _, _ in printed),
        Column("remat", group="here", words=True),
        *here,
    ]

    def cells(row: Row, name: str) -> list[Cell]:
        return _cells(
            plans,
            name,
            1 + len(here),
            ("remat",),
            lambda plan: [cell for cell, is_shown in zip(_benchmark_cells(plan, row), shown) if is_shown],
        )

    rows = []
    for row in of.rows:
        values = [_printed(getattr(row, attribute), unit) for _, attribute, unit in printed]
        rows.append([row.model, row.mesh, row.batch, *values, *cells(row, row.plan)])
        if row in published.OF_THREE_LAYOUTS:
            rows += [
                [
                    f"{row.model}, attempt {number}",
                    row.mesh,
                    row.batch,
                    *[_NONE] * len(printed),
                    *cells(row, row.plan + variant),
                ]
                for number, variant in enumerate(reading.ATTEMPTS, 1)
            ]
    return table((f"{of.title}.",), columns, rows)


def _benchmark_cells(plan: Plan, row: Row) -> list[Cell]:
    kilotokens = plan.tokens / plan.step_seconds / 1000
    ratio = times(float(row.kilotokens), kilotokens) if row.kilotokens else times(plan.step_seconds, row.step)
    all_to_all = reading.collectives_by_kind(plan)["AllToAll"] / plan.step_seconds
    return [
        gib(plan.memory.total),
        seconds(plan.step_seconds),
        ratio,
        percent(plan.utilisation),
        percent(all_to_all),
        f"{kilotokens:.2f}" if kilotokens < 10 else f"{kilotokens:.1f}",
    ]


def origins(plans: Plans) -> Element:
    """How each plan was made."""
    columns = [
        Column("plan"),
        Column("weights", "[p]"),
        Column("fits", "[c]", words=True),
        Column("command", words=True),
    ]
    rows = [
        [name, f"{plan.weights:,}", "yes" if plan.fits else "no", Span(1, (code(_command(plan)),))]
        for name, plan in plans.items()
    ]
    return table(("All plans that were found, and the command that makes each.",), columns, rows)


def _command(plan: Plan) -> str:
    program = "" if plan.program == "train" else f" --program={plan.program}"
    changes = "".join(f" --set={changed}" for changed in plan.changes)
    where = f" --topology={plan.topology} --mesh={plan.mesh}"
    own = [row for row in (*published.rows(), published.TRILLION) if row.plan == plan.model]
    if own and plan.mesh == own[0].mesh.strip("()").replace(",", "x") and plan.topology == v3_slice(own[0].cores):
        where = ""  # what `plan` chooses by itself
    return f"python -m lingvo_moe plan {plan.model}{program}{where}{changes}"


def missing(plans: Plans) -> list[str]:
    """Names of plans that the tables would show and that are not there."""
    wanted = [row.plan for row in (*published.rows(), published.TRILLION)]
    wanted += [row.plan + reading.EACH_SIDE for row in published.GSHARD_3.rows if row.steps_per_second]
    wanted += [row.plan for pair in pairs_of_experts() for row in pair]
    wanted += [row.plan + attempt for row in published.OF_THREE_LAYOUTS for attempt in reading.ATTEMPTS]
    wanted.append(published.TRILLION.plan + reading.REPLICATED)
    return [name for name in dict.fromkeys(wanted) if name not in plans]


def note(*children: Child) -> Element:
    """What stands under a table."""
    return element("p", *children, class_="note")
