"""The table of models on clusters of GPUs, `plan_zoo.clusters`."""

from __future__ import annotations

from lingvo_moe.engines.cluster import GPUS
from tools.report import plans as of_plans
from tools.report.plans import TRILLION_TOKENS, Plans
from tools.report.tables import Column, Table, does_not_fit, gib, percent, seconds


def table(plans: Plans) -> Table:
    """Every plan for GPUs, by model and GPU."""
    columns = [
        Column("model", words=True),
        Column("cluster", words=True),
        Column("mesh"),
        Column("remat", words=True),
        Column("memory per GPU, GiB", "[c, p]"),
        Column("compute, s", "[m]"),
        Column("collectives, s", "[m]"),
        Column("schedule, s", "[c]"),
        Column("1000 tokens/s", "[m]"),
        Column("of peak", "[m, p]"),
        Column("GPU-years for 1T tokens", "[m]"),
    ]
    chosen = [plan for plan in plans.values() if plan.device == "GPU" and plan.program == "train"]
    order = list(GPUS)
    chosen.sort(key=lambda plan: (plan.model, order.index(plan.topology.partition(":")[0])))
    rows = []
    for plan in chosen:
        where = [plan.model, plan.topology, plan.mesh, plan.remat]
        if not plan.fits:
            rows.append([*where, does_not_fit(plan, len(columns) - len(where))])
            continue
        step = of_plans.step_seconds(plan)
        rows.append(
            [
                *where,
                gib(plan.memory.total),
                seconds(step - plan.collective_seconds),
                seconds(plan.collective_seconds),
                seconds(plan.scheduled_seconds),
                f"{plan.tokens / step / 1000:,.0f}",
                percent(plan.utilisation),
                f"{plan.core_years(TRILLION_TOKENS):.2f}",
            ]
        )
    return Table("Models of the papers on clusters of GPUs.", columns, rows)
