"""Reads plans from a directory, checks them, and derives the quantities that the report shows."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

from lingvo_moe.analysis.hardware import GENERATIONS
from lingvo_moe.analysis.plan import Plan
from lingvo_moe.engines.cluster import GPUS
from lingvo_moe.errors import UserError
from tools.report import files, published

V3 = GENERATIONS["v3"]
GIB = 2**30
TRILLION_TOKENS = 1e12
Plans = Mapping[str, Plan]
# Suffixes of a registered name in the names of its variants, see `plan_zoo.variants`.
BOTH_SIDES, TOKENS_PER_CORE, REPLICATED = ".both_sides", ".tokens_per_core", ".replicated"
ATTEMPTS = (".gspmd_attempt_1", ".gspmd_attempt_2")
_COMPARED = ("", BOTH_SIDES, TOKENS_PER_CORE, REPLICATED, *ATTEMPTS)

# Groups of model parts in the order of the bars; a part in no group counts in the last one.
PARTS = {
    "attention": ("self_attention", "cross_attention"),
    "feed-forward": ("feed_forward",),
    "experts": ("experts",),
    "gating": ("gating",),
    "dispatch, combine": ("dispatch", "combine"),
    "embedding, softmax": ("embedding", "softmax"),
    "optimizer": ("optimizer",),
    "other compute": (),
}
COLLECTIVES = {"AllToAll": ("all-to-all",), "AllReduce": ("all-reduce",), "other collectives": ()}


def load(directory: pathlib.Path) -> dict[str, Plan]:
    """Returns all plans of a directory, sorted, keyed by their files' stems.

    Raises:
      UserError: there is no plan, or a file is not a valid plan or is named after another model.
    """
    paths = sorted(directory.glob("*.json"), key=lambda path: path.stem)
    if not paths:
        raise UserError(f"--plans={directory}: no plan (NAME.json) found; `python -m tools.plan_zoo` makes them.")
    plans = {path.stem: Plan.load(path) for path in paths}
    for path in paths:
        _check(plans[path.stem], path)
    return plans


def _check(plan: Plan, path: pathlib.Path):
    remedy = f"regenerate it with `python -m lingvo_moe plan NAME --json={path}`."
    if mistyped := files.mistyped(plan):
        raise UserError(f"{path}: not a valid plan (wrong type of {', '.join(mistyped)}); {remedy}")
    if not _is_complete(plan):
        raise UserError(f"{path}: not a complete plan: its figures contradict each other or are no sizes; {remedy}")
    if path.stem != plan.model and not path.stem.startswith(f"{plan.model}."):
        raise UserError(f"{path}: a plan of {plan.model}; the file's name must be {plan.model}.json or start with it.")
    compared = {row.plan + variant for row in (*published.rows(), published.TRILLION) for variant in _COMPARED}
    if path.stem in compared and not (plan.program == "train" and plan.topology.startswith("v3:")):
        raise UserError(
            f"{path}: program {plan.program} on {plan.topology}, but the published figures are of training on TPU v3; "
            f"rename the file, for instance to {plan.model}.other.json."
        )


def _is_complete(plan: Plan) -> bool:
    """Returns whether every figure that the report shows or divides by is known."""
    if not plan.devices or not plan.tokens or plan.topology.partition(":")[0] not in GENERATIONS | GPUS:
        return False
    if plan.program == "train" and plan.model_flops is None:
        return False
    if not plan.fits:
        return plan.memory.available is not None
    known = (plan.rematerialised_cycles, plan.memory.temporaries)
    return bool(plan.cycles) and None not in known and plan.compute_seconds != 0


def fitting(plans: Plans, name: str) -> Plan | None:
    """Returns the plan of that name if there is one and it fits."""
    plan = plans.get(name)
    return plan if plan is not None and plan.fits else None


def differences(few: Plan, many: Plan) -> str:
    """Returns how two plans differ besides their numbers of experts; empty where they are comparable."""
    tokens = [f"{plan.tokens / plan.devices:,.0f}" for plan in (few, many)]
    found = [f"{' and '.join(tokens)} tokens per core"] if tokens[0] != tokens[1] else []
    return "; ".join([*found, *([f"remat {few.remat} and {many.remat}"] if few.remat != many.remat else [])])


def available_memory(plans: Plans) -> int | None:
    """Returns the bytes of a v3 core that a program may use.

    The compiler states them only where a program does not fit.
    """
    stated = (p.memory.available for p in plans.values() if not p.fits and p.topology.startswith("v3:"))
    return max((size for size in stated if size is not None), default=None)


def step_seconds(plan: Plan) -> float:
    """Returns the seconds of a step of a plan that fits."""
    assert plan.step_seconds is not None, "only plans that fit have a step time"
    return plan.step_seconds


def rematerialised_share(plan: Plan) -> float:
    """Returns the share of the cycles that recompute activations; `plan` fits."""
    assert plan.cycles and plan.rematerialised_cycles is not None, "only plans that fit have cycles"
    return plan.rematerialised_cycles / plan.cycles


def bubble_share(plan: Plan) -> float:
    """Returns the share of the cycles in which a stage of a pipeline has no microbatch; `plan` fits."""
    assert plan.cycles, "only plans that fit have cycles"
    return plan.bubble_cycles / plan.cycles


def compute_by_part(plan: Plan) -> dict[str, float]:
    """Returns seconds keyed by the names of PARTS; `plan` fits a slice with a known clock."""
    assert V3.clock, "TPU v3 has a published clock"
    return _grouped({part: cycles / V3.clock for part, cycles in plan.cycles_by_part.items()}, PARTS)


def collectives_by_kind(plan: Plan) -> dict[str, float]:
    """Returns seconds keyed by the names of COLLECTIVES."""
    found: dict[str, float] = {}
    for collective in plan.collectives:
        found[collective.kind] = found.get(collective.kind, 0.0) + collective.seconds
    return _grouped(found, COLLECTIVES)


def _grouped(seconds: Mapping[str, float], groups: Mapping[str, tuple[str, ...]]) -> dict[str, float]:
    group_of = {member: group for group, members in groups.items() for member in members}
    found = dict.fromkeys(groups, 0.0)
    last = list(groups)[-1]
    for name, value in seconds.items():
        found[group_of.get(name, last)] += value
    return found


def all_to_all_share(plan: Plan) -> float:
    """Returns the share of the step that AllToAll takes; `plan` fits."""
    return collectives_by_kind(plan)["AllToAll"] / step_seconds(plan)


def peak_seconds(plan: Plan) -> float:
    """Returns the time of the model's own operations at the cores' peak; `plan` is of training."""
    assert plan.model_flops is not None, "plans of training count the model's operations"
    return plan.model_flops / (plan.devices * V3.peak_flops)


def at_peak_seconds(plan: Plan) -> float:
    """Returns the time of the model's own operations at the cores' peak plus that of the collectives."""
    return peak_seconds(plan) + plan.collective_seconds


def implied_utilisation(plan: Plan, steps_per_second: str) -> float:
    """Returns the share of the cores' peak that a plan's step needs at a published speed."""
    return peak_seconds(plan) * float(steps_per_second)
