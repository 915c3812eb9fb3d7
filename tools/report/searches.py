"""Shows docs/layout_searches.json, the results of tools.partitioning.layout_searches, beside compiled plans."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from lingvo_moe.analysis.plan import Plan
from tools.report import files
from tools.report.plans import Plans
from tools.report.tables import Cell, Column, Table, ratio, seconds

_NOT_COMPILED = "not compiled"


@dataclasses.dataclass(frozen=True)
class LayoutSearch:
    """What a search predicts.

    Attributes:
      model: the registered model.
      layouts: the number of legal layouts.
      faster: how many of them are predicted to be faster than the model's own.
      cpu_seconds: of the search, on one core.
      own_seconds: a step in the model's own layout, predicted.
      found_seconds: a step in the fastest layout, predicted.
      found: the fastest layout's changes of settings, each `field=value`; none if no layout is faster by a thousandth.
    """

    model: str
    layouts: int
    faster: int
    cpu_seconds: float
    own_seconds: float
    found_seconds: float
    found: tuple[str, ...]


def save(found: Sequence[LayoutSearch], path: pathlib.Path):
    """Writes the results."""
    files.save([dataclasses.asdict(one) for one in found], path)


def load(path: pathlib.Path) -> list[LayoutSearch]:
    """Reads what `save` wrote; raises UserError as `files.load` does."""
    return files.load("--layout_searches", path, "tools.partitioning.layout_searches", _made)


def _made(content: Any) -> list[LayoutSearch]:
    return [LayoutSearch(**{**one, "found": tuple(files.listed(one["found"]))}) for one in files.listed(content)]


def table(found: Sequence[LayoutSearch], plans: Plans) -> Table:
    """A row for each search: the model's own layout and the fastest one, predicted and compiled, and the time spent."""
    columns = [
        Column("model", words=True),
        Column("legal layouts"),
        Column("search, CPU s"),
        Column("compilation, s"),
        Column("own layout: predicted step, s", "[m]"),
        Column("compiled, s", "[c, m]"),
        Column("fastest found", words=True),
        Column("predicted step, s", "[m]"),
        Column("compiled, s", "[c, m]"),
        Column("compiled, found / own"),
    ]
    return Table("Layouts that the search finds, beside the models' own.", columns, [_row(one, plans) for one in found])


def _row(search: LayoutSearch, plans: Plans) -> list[Cell]:
    own, best = _plan(plans, search.model, ()), _plan(plans, search.model, search.found)
    compiled = {id(plan): plan.compile_seconds for plan in (own, best) if plan}
    return [
        search.model,
        f"{search.layouts:,}",
        f"{search.cpu_seconds:.0f}",
        f"{sum(compiled.values()):.0f}" if compiled else _NOT_COMPILED,
        seconds(search.own_seconds),
        _step(own),
        " ".join(search.found) or "the model's own",
        seconds(search.found_seconds),
        _step(best),
        ratio(best.step_seconds, own.step_seconds) if own and best and search.found else "",
    ]


def _plan(plans: Plans, model: str, changes: Sequence[str]) -> Plan | None:
    """The training plan of a model with these changes on its own slice."""
    own = plans.get(model)
    for plan in plans.values():
        same = plan.model == model and plan.program == "train" and sorted(plan.changes) == sorted(changes)
        if same and own is not None and plan.topology == own.topology:
            return plan
    return None


def _step(plan: Plan | None) -> str:
    return seconds(plan.step_seconds) if plan and plan.fits else _NOT_COMPILED
