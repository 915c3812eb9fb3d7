"""What GShard's section 5 says of its models, beside what the plans say of them."""

from __future__ import annotations

from collections.abc import Callable
from xml.etree.ElementTree import Element

from lingvo_moe.analysis.plan import Plan
from tools.report import charts, published, reading
from tools.report.markup import Cell, Column, table
from tools.report.reading import Plans
from tools.report.tables import M4, change, does_not_fit, not_planned, pairs_of_experts, percent

PROMISE = 0.1  # how much memory may differ from 128 to 2048 experts
_SECTION = "paper: GShard section"


def claims(plans: Plans) -> Element:
    """The table; where plans of two numbers of experts are compared, what else differs between them is told."""
    columns = [
        Column("GShard says"),
        Column("where", words=True),
        Column("of the model", words=True),
        Column("published", group="paper"),
        Column("planned", group="here"),
        Column("source", group="here", words=True),
    ]
    return table(
        ("What GShard's section 5 says of M4, and the same of the plans.",),
        columns,
        [*_of_memory(plans), *_of_time(plans), *_of_links()],
    )


def _of_memory(plans: Plans):
    for few, many in pairs_of_experts():
        yield [
            "memory with 2048 experts against 128",
            f"{_SECTION} 5.1",
            _layers(many),
            "constant",
            _compare(plans, (few.plan, many.plan), _memory_difference),
            "[c, p]",
        ]
    for row, says in zip((row for row in M4 if "2048E" in row.model), ("0 %", "28 %", "34 %"), strict=True):
        yield [
            "share of cycles that compute again",
            f"{_SECTION} 5.1",
            row.model,
            says,
            _compare(plans, (row.plan,), lambda plan: percent(plan.rematerialised_cycles / plan.cycles)),
            "[c]",
        ]


def _of_time(plans: Plans):
    ratios = (
        (
            "time with 2048 experts against 128",
            "1.7 ×",
            lambda few, many: f"{many.step_seconds / few.step_seconds:.2f} ×",
            "[c, m]",
        ),
        ("time of AllToAll with 2048 experts against 128", "3.75 ×", _all_to_all_growth, "[m]"),
    )
    shares = (
        (
            "share of the roofline",
            ("> 70 %", "48 %"),
            lambda plan: percent(reading.roofline_seconds(plan) / plan.step_seconds),
            "[c, p, m]",
        ),
        (
            "share of AllToAll in the time",
            ("16 %", "36 %"),
            lambda plan: percent(_all_to_all(plan) / plan.step_seconds),
            "[c, m]",
        ),
        (
            "share of gating in the time",
            ("negligible", "< 10 %"),
            lambda plan: percent(reading.compute_by_part(plan)["gating"] / plan.step_seconds),
            "[c, m]",
        ),
    )
    pairs = pairs_of_experts()
    for what, says, function, source in ratios:
        for few, many in pairs:
            yield [
                what,
                f"{_SECTION} 5.2",
                _layers(many),
                says,
                _compare(plans, (few.plan, many.plan), function),
                source,
            ]
    for what, both, function, source in shares:
        for pair in pairs:
            for row, says in zip(pair, both):
                yield [what, f"{_SECTION} 5.2", row.model, says, _compare(plans, (row.plan,), function), source]


def _of_links():
    for name, kind, says in (("AllToAll", "all-to-all", "9 ×"), ("AllReduce", "all-reduce", "O(1)")):
        yield [
            f"time of {name} with 2048 partitions against 16",
            f"{_SECTION} 5.3",
            "any",
            says,
            f"{charts.collective_growth(kind):.1f} ×",
            "[m]",
        ]


def _layers(row: published.Row) -> str:
    return f"{row.model.partition(', ')[2].rstrip('L)')} layers"


def _compare(plans: Plans, names: tuple[str, ...], function: Callable[..., str]) -> Cell:
    for name in names:
        if name not in plans:
            return not_planned(name, 1)
        if not plans[name].fits:
            return does_not_fit(plans[name], 1)
    found = [plans[name] for name in names]
    unlike = reading.unlike(*found) if len(found) == 2 else ""
    return function(*found) + (f" (unlike: {unlike})" if unlike else "")


def _memory_difference(few: Plan, many: Plan) -> str:
    within = "within" if abs(many.memory.total / few.memory.total - 1) <= PROMISE else "not within"
    return f"{change(many.memory.total, few.memory.total)}, {within} {percent(PROMISE, 0)}"


def _all_to_all(plan: Plan) -> float:
    return reading.collectives_by_kind(plan)["AllToAll"]


def _all_to_all_growth(few: Plan, many: Plan) -> str:
    return f"{_all_to_all(many) / _all_to_all(few):.2f} ×" if _all_to_all(few) else "none in the smaller"
