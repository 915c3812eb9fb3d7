"""The tables of models on clusters of GPUs and slices of newer TPUs, `plan_zoo.clusters`, as HTML and as Markdown."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from lingvo_moe.analysis.hardware import GENERATIONS
from lingvo_moe.analysis.plan import CollectiveCost, Plan
from lingvo_moe.engines.cluster import GPUS
from tools import markdown
from tools.report import plans as of_plans
from tools.report.plans import TRILLION_TOKENS, Plans
from tools.report.tables import Cell, Column, Span, Table, does_not_fit, gib, percent, seconds

# The published tables are of TPU v3; all other devices are here.
_DEVICES = (*GPUS, *(name for name in GENERATIONS if name != "v3"))
_NONE = "–"


def table(plans: Plans) -> Table:
    """Every plan of a model as it is registered, by model and device."""
    columns = [
        Column("model", words=True),
        Column("devices", words=True),
        Column("mesh"),
        Column("remat", words=True),
        Column("memory per device, GiB", "[c, p]"),
        Column("compute, s", "[m]; TPU: [c]"),
        Column("collectives, s", "[m]"),
        Column("schedule, s", "[c]"),
        Column("1000 tokens/s", "[c, m]"),
        Column("of peak", "[c, p, m]"),
        Column("device-years for 1T tokens", "[c, m]"),
    ]
    chosen = [plan for name, plan in plans.items() if name == _name(plan) and _is_elsewhere(plan)]
    caption = "Models of the papers on clusters of GPUs and slices of newer TPUs."
    return _table(caption, columns, chosen, ("model", "topology", "mesh", "remat"), _figures)


def meshes(plans: Plans) -> Table:
    """Models on one cluster with several meshes and layouts: where their experts are, and what that costs."""
    columns = [
        Column("model", words=True),
        Column("devices", words=True),
        Column("mesh"),
        Column("layout", words=True),
        Column("remat", words=True),
        Column("memory per device, GiB", "[c, p]"),
        Column("compute, s", "[m]"),
        Column("AllToAll, s", "[m]"),
        Column("AllReduce, s", "[m]"),
        Column("AllGather, ReduceScatter, others, s", "[m]"),
        Column("step, s", "[m]"),
        Column("schedule, s", "[c]"),
    ]
    others = [plan for name, plan in plans.items() if name.startswith(f"{_name(plan)}.") and _is_elsewhere(plan)]
    names = {_name(plan) for plan in others}
    chosen = [*(plan for name, plan in plans.items() if name in names), *others]
    where = ("model", "topology", "mesh", "layout", "remat")
    return _table("Meshes and layouts on one cluster.", columns, chosen, where, _divided)


def _table(
    caption: str, columns: list[Column], chosen: Iterable[Plan], where: Sequence[str], figures: Callable
) -> Table:
    """A row for each plan: the attributes `where`, then `figures(plan)`, or that the program does not fit."""
    rows = []
    for plan in sorted(chosen, key=_order):
        found = figures(plan) if plan.fits else [does_not_fit(plan, len(columns) - len(where))]
        rows.append([*(getattr(plan, name) for name in where), *found])
    return Table(caption, columns, rows)


def text(table: Table) -> str:
    """Returns a table as Markdown, without its caption."""
    heads = [f"{column.head} {column.source}".strip() for column in table.columns]
    return markdown.table(heads, [list(_texts(row)) for row in table.rows])


def texts(plans: Plans) -> dict[str, str]:
    """Returns both tables as Markdown, by the names of their markers."""
    return {"clusters": text(table(plans)), "meshes": text(meshes(plans))}


def _name(plan: Plan) -> str:
    """The name of the plan of a model as it is registered, see `plan_zoo.clusters`."""
    return f"{plan.model}.{plan.topology.replace(':', '-')}"


def _is_elsewhere(plan: Plan) -> bool:
    return plan.program == "train" and _device(plan) in _DEVICES


def _device(plan: Plan) -> str:
    return plan.topology.partition(":")[0]


def _order(plan: Plan) -> tuple[str, int]:
    return plan.model, _DEVICES.index(_device(plan))


def _figures(plan: Plan) -> list[Cell]:
    """The cells of a plan that fits; of a TPU without a published clock, what needs no clock."""
    known = [gib(plan.memory.total), seconds(plan.compute_seconds), seconds(plan.collective_seconds)]
    if plan.step_seconds is None:
        return [*known, *[_NONE] * 4]
    return [
        *known,
        seconds(plan.scheduled_seconds),
        f"{plan.tokens / plan.step_seconds / 1000:,.0f}",
        percent(plan.utilisation),
        f"{plan.device_years(TRILLION_TOKENS):.2f}",
    ]


def _divided(plan: Plan) -> list[Cell]:
    """The cells of a plan that fits, with its collectives by kind."""

    def of(*kinds: str) -> float:
        return sum(cost.seconds for cost in plan.collectives if _kind(cost) in kinds)

    by_kind = (of("all-to-all"), of("all-reduce"), of(""))
    step, schedule = of_plans.step_seconds(plan), plan.scheduled_seconds
    return [gib(plan.memory.total), *map(seconds, (step - plan.collective_seconds, *by_kind, step, schedule))]


def _kind(cost: CollectiveCost) -> str:
    """AllToAll and AllReduce have columns of their own."""
    return cost.kind if cost.kind in ("all-to-all", "all-reduce") else ""


def _texts(row) -> list[str]:
    """The cells of a row as plain text; a cell over several columns is followed by empty ones."""
    texts = []
    for cell in row:
        if isinstance(cell, Span):
            texts += [re.sub(r"<[^>]*>", "", cell.text), *[""] * (cell.columns - 1)]
        else:
            texts.append(cell)
    return texts
