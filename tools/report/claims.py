"""The statements of GShard's section 5 about its models, beside the same quantities of the plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from lingvo_moe.analysis.plan import Plan
from tools.report import layers, links, published
from tools.report import plans as of_plans
from tools.report.layers import LayerPair
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
_NO_PAIRS = "not compiled: python -m tools.partitioning.layer_pairs"


def claims(plans: Plans, pairs: Sequence[LayerPair]) -> Table:
    """Returns the table; where two plans are compared, their other differences are named."""
    columns = [
        Column("claim"),
        Column("where", words=True),
        Column("of the model", words=True),
        Column("published", group="paper"),
        Column("planned", group="here"),
        Column("source", group="here", words=True),
    ]
    rows = [*_memory(plans), *_time(pairs), *_links()]
    return Table("What GShard's section 5 claims of M4, and the same quantities of the plans.", columns, rows)


def _row(what: str, section: str, model: str, published: str, planned: Cell, source: str) -> list[Cell]:
    return [what, f"paper: GShard section {section}", model, published, planned, source]


def _memory(plans: Plans) -> Iterator[list[Cell]]:
    for few, many in pairs_of_experts():
        planned = _figure(plans, (few.plan, many.plan), _memory_difference)
        yield _row("memory with 2048 experts against 128", "5.1", _layers(many), "constant", planned, "[c, p]")
    for row, claimed in zip((row for row in M4 if "2048E" in row.model), _RECOMPUTED, strict=True):
        planned = _figure(plans, (row.plan,), lambda plan: percent(of_plans.rematerialised_share(plan)))
        yield _row("share of cycles that recompute activations", "5.1", row.model, claimed, planned, "[c]")


def _time(pairs: Sequence[LayerPair]) -> Iterator[list[Cell]]:
    """The claims of section 5.2 (figure 8) beside the compiled pairs of layers with fewest and most experts."""
    both = layers.growth(pairs)
    growths: tuple[tuple[str, str, Callable[[LayerPair], float], str], ...] = (
        ("time with 2048 experts against 128", "1.7 ×", lambda pair: pair.seconds, "[c, m]"),
        ("time of AllToAll with 2048 experts against 128", "3.75 ×", lambda pair: pair.all_to_all, "[m]"),
    )
    shares: tuple[tuple[str, tuple[str, str], Callable[[LayerPair], float], str], ...] = (
        ("share of the roofline", ("> 70 %", "48 %"), lambda pair: pair.roofline_seconds / pair.seconds, "[c, m]"),
        ("share of AllToAll in the time", ("16 %", "36 %"), lambda pair: pair.all_to_all / pair.seconds, "[c, m]"),
        (
            "share of gating in the time, here with its projection",
            ("negligible", "< 10 %"),
            lambda pair: pair.gating / pair.seconds,
            "[c, m]",
        ),
    )
    for what, claimed, value, source in growths:
        found = ratio(value(both[1]), value(both[0])) if both else _NO_PAIRS
        yield _row(what, "5.2", "two layers", claimed, found, source)
    for what, claimed, value, source in shares:
        for index, experts in enumerate((128, 2048)):
            found = percent(value(both[index])) if both else _NO_PAIRS
            yield _row(what, "5.2", f"two layers, {experts} experts", claimed[index], found, source)


def _links() -> Iterator[list[Cell]]:
    for name, kind, claimed in (("AllToAll", "all-to-all", "9 ×"), ("AllReduce", "all-reduce", "O(1)")):
        growth = f"{links.growth(kind):.1f} ×"
        yield _row(f"time of {name} with 2048 partitions against 16", "5.3", "any", claimed, growth, "[m]")


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
