"""The report's tables as data: the papers' figures beside those of the plans, row by row."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

from markupsafe import Markup

from lingvo_moe.analysis.plan import Plan
from lingvo_moe.engines.topology import v3_slice
from tools.report import links, published
from tools.report import plans as of_plans
from tools.report.plans import GIB, TRILLION_TOKENS, Plans
from tools.report.published import Row


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
      head: what it shows.
      source: the evidence mark of its figures, in brackets; empty for what names the row.
      group: `paper: SOURCE`, `here` or another heading that neighbouring columns share.
      words: whether it shows words, aligned left.
    """

    head: str
    source: str = ""
    group: str = ""
    words: bool = False

    @property
    def css(self) -> str:
        """The classes of its cells."""
        kind = self.group.partition(":")[0]
        return " ".join(["words" if self.words else "number", *([kind] if kind in ("paper", "here") else [])])


@dataclasses.dataclass(frozen=True)
class Span:
    """One cell over several columns, with text in place of their figures."""

    columns: int
    text: str


Cell = str | Span


@dataclasses.dataclass(frozen=True)
class Table:
    """A table; the first cell of a row is its heading."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]

    def __post_init__(self):
        for row in self.rows:
            width = sum(cell.columns if isinstance(cell, Span) else 1 for cell in row)
            if width != len(self.columns):
                raise ValueError(f"{width} cells in a row of {len(self.columns)} columns, {row[0]}")

    def groups(self) -> list[tuple[str, int]]:
        """Returns the headings above the columns, with their widths; empty if no column has one."""
        groups = [(name, len(list(members))) for name, members in itertools.groupby(c.group for c in self.columns)]
        return groups if any(name for name, _ in groups) else []

    def cells(self, row: Sequence[Cell]) -> Iterator[tuple[str, int, str]]:
        """Yields text, width and CSS classes of a row's cells after its heading."""
        at = 1
        for cell in row[1:]:
            span = cell if isinstance(cell, Span) else Span(1, cell)
            css = self.columns[at].css
            yield span.text, span.columns, css.replace("number", "words") if cell is span else css
            at += span.columns


# By layers, then by experts.
M4 = (*published.GSHARD_3.rows[5::-2], *published.GSHARD_3.rows[4::-2], published.TRILLION)
_NONE = "–"


def pairs_of_experts() -> list[tuple[Row, Row]]:
    """Returns M4's rows of 128 and of 2048 experts with equal layers, of the plans with equal tokens per core."""
    by_name = {row.plan: row for row in M4}
    return [
        (
            dataclasses.replace(by_name[few], plan=few + of_plans.TOKENS_PER_CORE),
            by_name[many],
        )
        for few, many in ((f"m4.MoE128E{layers}L", f"m4.MoE2048E{layers}L") for layers in (12, 36))
    ]


def gib(size: float | None) -> str:
    """Formats bytes as GiB with two digits."""
    return _NONE if size is None else f"{size / GIB:.2f}"


def percent(share: float | None, digits: int = 1) -> str:
    """Formats a share of one."""
    return _NONE if share is None else f"{share * 100:.{digits}f} %"


def change(new: float, old: float) -> str:
    """Formats a relative difference."""
    return f"{(new / old - 1) * 100:+.1f} %"


def ratio(ours: float | None, theirs: float | None) -> str:
    """Formats a quotient."""
    return _NONE if ours is None or theirs is None else f"{ours / theirs:.2f} ×"


def seconds(value: float | None) -> str:
    """Formats seconds with three digits or more."""
    return _NONE if value is None else f"{value:.3f}" if value < 1 else f"{value:.2f}"


def not_planned(name: str, columns: int) -> Span:
    """Replaces the figures of a missing plan by the command that makes it."""
    return Span(columns, Markup("not planned: <code>python -m tools.plan_zoo --only={}</code>").format(name))


def does_not_fit(plan: Plan, columns: int) -> Span:
    """Replaces the figures of a plan that does not fit by the compiler's answer."""
    text = Markup("<strong>does not fit: </strong>needs {} of {} GiB [c]")
    return Span(columns, text.format(gib(plan.memory.needed), gib(plan.memory.available)))


def _printed(value: str | None, unit: str = "") -> str:
    return _NONE if value is None else f"{value}{unit}"


def _cells(
    plans: Plans,
    name: str,
    columns: int,
    figures: Callable[[Plan], Sequence[str]],
    known: Callable[[Plan], Sequence[str]] = lambda plan: (),
) -> list[Cell]:
    """Returns a plan's cells: those that are `known` of every plan, then `figures` if it fits, otherwise the reason."""
    plan = plans.get(name)
    if plan is None:
        return [not_planned(name, columns)]
    cells: list[Cell] = [*known(plan)]
    return [*cells, *(figures(plan) if plan.fits else [does_not_fit(plan, columns - len(cells))])]


def _remat(plan: Plan) -> Sequence[str]:
    return (plan.remat,)


def memory(plans: Plans) -> Table:
    """GShard figure 7's kinds of memory, for each M4 model and the variants that it is compared with."""
    held = ("replicated weights", "distributed weights", "optimizer state", "inputs")
    columns = [
        Column("model"),
        Column("cores", "[p]"),
        Column("tokens per core", "[p]"),
        Column("remat", words=True),
        *(Column(head, "[p]", "GiB per core") for head in held),
        Column("activations, buffers", "[c]", "GiB per core"),
        Column("together", "[c, p]", "GiB per core"),
    ]
    rows = [(row.model, row.plan) for row in (*M4, published.GSHARD_3.rows[-1])]
    rows += [(f"{row.model}, equal tokens per core", row.plan) for pair in pairs_of_experts() for row in pair]
    rows.append(
        (f"{published.TRILLION.model}, all dense weights replicated", published.TRILLION.plan + of_plans.REPLICATED)
    )

    def known(plan: Plan) -> list[str]:
        m = plan.memory
        sizes = (m.replicated_weights, m.distributed_weights, m.optimizer_state, m.inputs)
        return [f"{plan.devices}", f"{plan.tokens / plan.devices:,.0f}", plan.remat, *map(gib, sizes)]

    def figures(plan: Plan) -> list[str]:
        return [gib(plan.memory.temporaries), gib(plan.memory.total)]

    return Table(
        "Memory of one core, by what it holds: the figures of the chart above.",
        columns,
        [[label, *_cells(plans, name, 9, figures, known)] for label, name in rows],
    )


def breakdown(plans: Plans) -> Table:
    """Breaks down the step of each M4 model, and compares it with the cores' peak."""
    columns = [
        Column("model"),
        Column("compute", "[c]", "seconds of a step"),
        *(Column(kind, "[m]", "seconds of a step") for kind in of_plans.COLLECTIVES),
        Column("together", "[c, m]", "seconds of a step"),
        Column("share of AllToAll", "[c, m]"),
        Column("at the peak, s", "[p, m]"),
        Column("at the peak / step", "[c, p, m]"),
        Column("recomputed", "[c]"),
    ]

    def figures(plan: Plan) -> list[str]:
        at_peak = of_plans.at_peak_seconds(plan)
        return [
            *map(seconds, (plan.compute_seconds, *of_plans.collectives_by_kind(plan).values(), plan.step_seconds)),
            percent(of_plans.all_to_all_share(plan)),
            seconds(at_peak),
            percent(at_peak / of_plans.step_seconds(plan)),
            percent(of_plans.rematerialised_share(plan)),
        ]

    return Table(
        "Time of one training step: the figures of the chart above. “Recomputed” is the share of cycles that compute "
        "activations a second time.",
        columns,
        [[row.model, *_cells(plans, row.plan, 9, figures)] for row in M4],
    )


def training(plans: Plans) -> Table:
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
        Column("memory per core, GiB", "[c, p]", "here"),
        Column("step, s", "[c, m]", "here"),
        Column("here / paper", group="here"),
        Column("core-years", "[c, m]", "here"),
        Column("of peak", "[c, p, m]", "here"),
    ]

    def figures(plan: Plan, row: Row) -> list[str]:
        years = _core_years(plan, TRILLION_TOKENS)
        step = plan.step_seconds
        return [gib(plan.memory.total), seconds(step), ratio(step, row.step), years, percent(plan.utilisation)]

    rows = []
    for row in published.GSHARD_3.rows:
        printed = [row.batch, _printed(row.steps_per_second), seconds(row.step)]
        printed += [_printed(row.core_years), _printed(row.days)]
        here = _cells(plans, row.plan, 6, lambda plan, row=row: figures(plan, row), _remat)
        rows.append([row.model, f"{row.cores}", *printed, *here])
    return Table(f"{published.GSHARD_3.title}: step time and cost of training on a trillion tokens.", columns, rows)


def _core_years(plan: Plan, tokens: float) -> str:
    years = plan.device_years(tokens)
    return _NONE if years is None else f"{years:.1f}"


def token_counts(plans: Plans) -> Table:
    """The two readings of a batch's tokens: the source's, or both sides together."""
    columns = [Column("model"), Column("steps/s", "paper: GShard table 3")]
    for group in ("source tokens", "tokens of both sides together"):
        columns += [
            Column("published speed would be, of peak", "[paper, p]", group),
            Column("step, s", "[c, m]", group),
            Column("here / paper", group=group),
            Column("core-years", "[c, m]", group),
        ]

    def cells(row: Row, speed: str, variant: str, source_tokens: float) -> list[Cell]:
        def figures(plan: Plan) -> list[str]:
            step = plan.step_seconds
            return [seconds(step), ratio(step, row.step), _core_years(plan, source_tokens)]

        def implied(plan: Plan) -> list[str]:
            return [percent(of_plans.implied_utilisation(plan, speed))]

        return _cells(plans, row.plan + variant, 4, figures, implied)

    return Table(
        "Two readings of “batch size (tokens)”: the utilisation that the published steps per second would mean under "
        "each, and the plans of both.",
        columns,
        [
            [
                row.model,
                speed,
                *cells(row, speed, "", TRILLION_TOKENS),
                *cells(row, speed, of_plans.BOTH_SIDES, TRILLION_TOKENS / 2),
            ]
            for row in published.GSHARD_3.rows
            if (speed := row.steps_per_second)
        ],
    )


# Published columns of a benchmark: heading, attribute of `Row`, unit.
_PUBLISHED = (
    ("memory, GB", "memory", ""),
    ("step, s", "seconds", ""),
    ("of peak", "utilisation", " %"),
    ("AllToAll", "all_to_all", " %"),
    ("1000 tokens/s", "kilotokens", ""),
    ("bubbles", "bubbles", " %"),
    ("recomputed", "recomputed", " %"),
)


def benchmark(plans: Plans, table: published.Table) -> Table:
    """A table of benchmarks; a model that is planned with other layouts has a row for each."""

    def is_published(*attributes: str) -> bool:
        return any(getattr(row, attribute) for row in table.rows for attribute in attributes)

    paper = f"paper: {table.source}"
    printed = [column for column in _PUBLISHED if is_published(column[1])]
    planned = [column for column, needs in _PLANNED if not needs or is_published(*needs)]
    columns = [
        Column("weights"),
        *(Column(head, group=paper) for head in ("mesh", "batch", *(head for head, _, _ in printed))),
        Column("remat", group="here", words=True),
        *(Column(head, source, "here") for head, source, _ in planned),
    ]

    def here(row: Row, variant: str = "") -> list[Cell]:
        name = row.plan + variant
        return _cells(plans, name, 1 + len(planned), lambda plan: [make(plan, row) for _, _, make in planned], _remat)

    rows: list[list[Cell]] = []
    for row in table.rows:
        values = [_printed(getattr(row, attribute), unit) for _, attribute, unit in printed]
        rows.append([row.model, row.mesh, row.batch, *values, *here(row)])
        for number, variant in enumerate(of_plans.ATTEMPTS if row in published.OF_THREE_LAYOUTS else (), 1):
            label = f"{row.model}, attempt {number}"
            rows.append([label, row.mesh, row.batch, *[_NONE] * len(printed), *here(row, variant)])
    return Table(f"{table.title}.", columns, rows)


def _kilotokens(plan: Plan) -> float:
    return plan.tokens / of_plans.step_seconds(plan) / 1000


def _step_ratio(plan: Plan, row: Row) -> str:
    if row.kilotokens:
        return ratio(float(row.kilotokens), _kilotokens(plan))
    return ratio(plan.step_seconds, row.step)


# A benchmark's columns of plans: (heading, source, text of a plan), and the published columns that one needs, if any.
_PLANNED: tuple[tuple[tuple[str, str, Callable[[Plan, Row], str]], tuple[str, ...]], ...] = (
    (("memory per core, GiB", "[c, p]", lambda plan, row: gib(plan.memory.total)), ()),
    (("step, s", "[c, m]", lambda plan, row: seconds(plan.step_seconds)), ()),
    (("step, here / paper", "", _step_ratio), ("seconds", "kilotokens")),
    (("of peak", "[c, p, m]", lambda plan, row: percent(plan.utilisation)), ()),
    (("AllToAll", "[c, m]", lambda plan, row: percent(of_plans.all_to_all_share(plan))), ("all_to_all",)),
    (
        ("1000 tokens/s", "[c, m]", lambda plan, row: f"{(k := _kilotokens(plan)):.{2 if k < 10 else 1}f}"),
        ("kilotokens",),
    ),
    (("bubbles", "[c]", lambda plan, row: percent(of_plans.bubble_share(plan))), ("bubbles",)),
    (("recomputed", "[c]", lambda plan, row: percent(of_plans.rematerialised_share(plan))), ("bubbles",)),
)


def collectives() -> Table:
    """The figures of GShard figure 9 by our model of the links; nothing of it is measured."""
    columns = [Column("D"), Column("slice", words=True)]
    columns += [Column(f"{size} MiB", "[m]", f"{name}, ms") for name in links.KINDS for size in links.SIZES]
    kinds = [(kind, size) for kind in links.KINDS.values() for size in links.SIZES]
    rows = [
        [f"{count}", v3_slice(count), *(f"{links.milliseconds(kind, count, size):.3f}" for kind, size in kinds)]
        for count in links.PARTITIONS
    ]
    growth = [f"{links.growth(kind):.1f} ×" for kind, _ in kinds]
    rows.append([f"{links.PARTITIONS[0]} to {links.PARTITIONS[-1]}", "", *growth])
    rows.append(["paper: GShard section 5.3", "", "9 ×", "9 ×", "O(1)", "O(1)"])
    caption = "Modelled time of one collective among all cores of the squarest TPU v3 slice, and its growth."
    return Table(caption, columns, rows)


def commands(plans: Plans) -> Table:
    """The command that makes each plan."""
    columns = [
        Column("plan"),
        Column("weights", "[p]"),
        Column("fits", "[c]", words=True),
        Column("command", words=True),
    ]
    rows = [
        [name, f"{plan.weights:,}", "yes" if plan.fits else "no", Markup("<code>{}</code>").format(_command(plan))]
        for name, plan in plans.items()
    ]
    return Table("All plans that were found, and the command that makes each.", columns, rows)


def _command(plan: Plan) -> str:
    program = "" if plan.program == "train" else f" --program={plan.program}"
    changes = "".join(f" --set={changed}" for changed in plan.changes)
    changes += "".join(f" --compiler_option={option}" for option in plan.compiler_options)
    mesh = "" if any(changed.startswith("mesh=") for changed in plan.changes) else f" --mesh={plan.mesh}"
    where = f" --topology={plan.topology}{mesh}"
    own = [row for row in (*published.rows(), published.TRILLION) if row.plan == plan.model]
    if own and plan.mesh == own[0].mesh.strip("()").replace(",", "x") and plan.topology == v3_slice(own[0].cores):
        where = ""  # the defaults of `plan`
    return f"python -m lingvo_moe plan {plan.model}{program}{where}{changes}"


def missing(plans: Plans) -> list[str]:
    """Returns the names of plans that the tables show and that are missing."""
    wanted = [row.plan for row in (*published.rows(), published.TRILLION)]
    wanted += [row.plan + of_plans.BOTH_SIDES for row in published.GSHARD_3.rows if row.steps_per_second]
    wanted += [row.plan for pair in pairs_of_experts() for row in pair]
    wanted += [row.plan + attempt for row in published.OF_THREE_LAYOUTS for attempt in of_plans.ATTEMPTS]
    wanted.append(published.TRILLION.plan + of_plans.REPLICATED)
    return [name for name in dict.fromkeys(wanted) if name not in plans]
