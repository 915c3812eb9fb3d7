"""The statements of GShard's section 5 about its models, beside the same quantities of the plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lingvo_moe.analysis.plan import Plan
from tools.report import links, published
from tools.report import plans as of_plans
from tools.report.plans import Plans
from tools.report.tables import (
    M4,
    Cell,
    Column,
    Table,
    change,
    does_not_fit,
    not_planned,
    pairs_of_experts,
    percent,
    ratio,
)

PROMISE = 0.1  # how much memory may differ between 128 and 2048 experts
_RECOMPUTED = ("0 %", "28 %", "34 %")  # with 12, 36 and 60 layers


def claims(plans: Plans) -> Table:
    """Returns the table; where two plans are compared, their other differences are named."""
    columns = [
        Column("GShard says"),
        Column("where", words=True),
        Column("of the model", words=True),
        Column("published", group="paper"),
        Column("planned", group="here"),
        Column("source", group="here", words=True),
    ]
    rows = [*_memory(plans), *_time(plans), *_links()]
    return Table("What GShard's section 5 says of M4, and the same of the plans.", columns, rows)


def _row(what: str, section: str, model: str, published: str, planned: Cell, source: str) -> list[Cell]:
    return [what, f"paper: GShard section {section}", model, published, planned, source]


def _memory(plans: Plans) -> Iterator[list[Cell]]:
    for few, many in pairs_of_experts():
        planned = _figure(plans, (few.plan, many.plan), _memory_difference)
        yield _row("memory with 2048 experts against 128", "5.1", _layers(many), "constant", planned, "[c, p]")
    for row, says in zip((row for row in M4 if "2048E" in row.model), _RECOMPUTED, strict=True):
        planned = _figure(plans, (row.plan,), lambda plan: percent(of_plans.rematerialised_share(plan)))
        yield _row("share of cycles that recompute activations", "5.1", row.model, says, planned, "[c]")


def _time(plans: Plans) -> Iterator[list[Cell]]:
    growths: tuple[tuple[str, str, Callable[[Plan, Plan], str], str], ...] = (
        (
            "time with 2048 experts against 128",
            "1.7 ×",
            lambda few, many: ratio(many.step_seconds, few.step_seconds),
            "[c, m]",
        ),
        ("time of AllToAll with 2048 experts against 128", "3.75 ×", _all_to_all_growth, "[m]"),
    )
    shares: tuple[tuple[str, tuple[str, str], Callable[[Plan], float], str], ...] = (
        (
            "share of the roofline",
            ("> 70 %", "48 %"),
            lambda plan: of_plans.roofline_seconds(plan) / of_plans.step_seconds(plan),
            "[c, p, m]",
        ),
        ("share of AllToAll in the time", ("16 %", "36 %"), of_plans.all_to_all_share, "[c, m]"),
        (
            "share of gating in the time",
            ("negligible", "< 10 %"),
            lambda plan: of_plans.compute_by_part(plan)["gating"] / of_plans.step_seconds(plan),
            "[c, m]",
        ),
    )
    for what, says, growth, source in growths:
        for few, many in pairs_of_experts():
            yield _row(what, "5.2", _layers(many), says, _figure(plans, (few.plan, many.plan), growth), source)
    for what, both, share, source in shares:
        for pair in pairs_of_experts():
            for row, says in zip(pair, both):
                planned = _figure(plans, (row.plan,), lambda plan, share=share: percent(share(plan)))
                yield _row(what, "5.2", row.model, says, planned, source)


def _links() -> Iterator[list[Cell]]:
    for name, kind, says in (("AllToAll", "all-to-all", "9 ×"), ("AllReduce", "all-reduce", "O(1)")):
        growth = f"{links.growth(kind):.1f} ×"
        yield _row(f"time of {name} with 2048 partitions against 16", "5.3", "any", says, growth, "[m]")


def _layers(row: published.Row) -> str:
    return f"{row.model.partition(', ')[2].rstrip('L)')} layers"


def _figure(plans: Plans, names: tuple[str, ...], figure: Callable[..., str]) -> Cell:
    for name in names:
        if name not in plans:
            return not_planned(name, 1)
        if not plans[name].fits:
            return does_not_fit(plans[name], 1)
    found = [plans[name] for name in names]
    differences = of_plans.differences(*found) if len(found) == 2 else ""
    return figure(*found) + (f" (unlike: {differences})" if differences else "")


def _memory_difference(few: Plan, many: Plan) -> str:
    within = "within" if abs(many.memory.total / few.memory.total - 1) <= PROMISE else "not within"
    return f"{change(many.memory.total, few.memory.total)}, {within} {percent(PROMISE, 0)}"


def _all_to_all_growth(few: Plan, many: Plan) -> str:
    before, after = (of_plans.collectives_by_kind(plan)["AllToAll"] for plan in (few, many))
    return ratio(after, before) if before else "none in the smaller"
