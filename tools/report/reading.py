"""Plans for the report: read from a directory, checked, and found by the names of published rows."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import types
import typing
from collections.abc import Mapping

from lingvo_moe.analysis.hardware import GENERATIONS
from lingvo_moe.analysis.plan import Plan
from lingvo_moe.errors import UserError
from tools.report import published

V3 = GENERATIONS["v3"]
GIB = 2**30
TRILLION_TOKENS = 1e12
Plans = Mapping[str, Plan]
# What follows a registered name in the names of plans that are set beside the papers, see `plan_zoo.variants`.
EACH_SIDE, TOKENS_PER_CORE, REPLICATED = ".each_side", ".tokens_per_core", ".replicated"
ATTEMPTS = (".gspmd_attempt_1", ".gspmd_attempt_2")
_COMPARED = ("", EACH_SIDE, TOKENS_PER_CORE, REPLICATED, *ATTEMPTS)

# What is shown as one, in the order of the bars; a part that is in none counts as the last.
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
COLLECTIVES = {"AllToAll": ("all-to-all",), "AllReduce": ("all-reduce",), "other exchanges": ()}


def load(directory: pathlib.Path) -> dict[str, Plan]:
    """All plans of a directory by the names of their files, sorted.

    Raises:
      UserError: there is no plan, or a file is not one, is incomplete, or is called after another model.
    """
    paths = sorted(directory.glob("*.json"), key=lambda path: path.stem)
    if not paths:
        raise UserError(
            f"--plans={directory}: no plan is there (NAME.json); `python -m tools.plan_zoo` makes them in docs/plans."
        )
    plans = {path.stem: Plan.load(path) for path in paths}
    for path in paths:
        _check(plans[path.stem], path)
    return plans


def _check(plan: Plan, path: pathlib.Path):
    mistyped = _mistyped(plan)
    remedy = f"`python -m lingvo_moe plan NAME --json={path}` writes it anew."
    if mistyped:
        raise UserError(
            f"{path}: not a plan of this version ({', '.join(mistyped)}: not of the expected kind); {remedy}"
        )
    if not _is_complete(plan):
        raise UserError(f"{path}: not a whole plan: its figures contradict each other or are no sizes; {remedy}")
    if path.stem != plan.model and not path.stem.startswith(f"{plan.model}."):
        raise UserError(
            f"{path}: a plan of {plan.model}; its file's name must be that or begin with {plan.model} and a dot."
        )
    compared = {row.plan + variant for row in (*published.rows(), published.TRILLION) for variant in _COMPARED}
    if path.stem in compared and not (plan.program == "train" and plan.topology.startswith("v3:")):
        raise UserError(
            f"{path}: program {plan.program} on {plan.topology}; what is published is training on TPU v3. Give the "
            f"file another name, for instance {plan.model}.other.json."
        )


def _mistyped(record) -> list[str]:
    """The fields of a dataclass that hold something else than they are declared to."""
    return [name for name, hint in typing.get_type_hints(type(record)).items() if not _is(getattr(record, name), hint)]


def _is(value, hint) -> bool:
    if dataclasses.is_dataclass(hint):
        return isinstance(value, hint) and not _mistyped(value)
    if isinstance(hint, types.UnionType):
        return any(_is(value, kind) for kind in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_is(item, typing.get_args(hint)[0]) for item in value)
    if typing.get_origin(hint) is dict:
        return isinstance(value, dict) and all(_is(item, typing.get_args(hint)[1]) for item in value.values())
    if hint in (int, float):
        return isinstance(value, (int, hint)) and math.isfinite(value) and value >= 0
    return isinstance(value, hint)


def _is_complete(plan: Plan) -> bool:
    """Whether all is known that this report divides by or shows."""
    if not plan.cores or not plan.tokens or plan.topology.partition(":")[0] not in GENERATIONS:
        return False
    if not plan.fits:
        return plan.memory.available is not None
    return (
        bool(plan.cycles)
        and plan.rematerialised_cycles is not None
        and plan.memory.temporaries is not None
        and plan.compute_seconds != 0
    )


def command_to_make(name: str) -> str:
    """The command that makes a plan of the zoo."""
    return f"python -m tools.plan_zoo --only={name}"


def fitting(plans: Plans, name: str) -> Plan | None:
    """The plan of that name where there is one and it fits."""
    plan = plans.get(name)
    return plan if plan is not None and plan.fits else None


def unlike(few: Plan, many: Plan) -> str:
    """In what two plans differ that are compared for their numbers of experts; empty where in nothing that matters."""
    tokens = [f"{plan.tokens / plan.cores:,.0f}" for plan in (few, many)]
    found = [f"{' and '.join(tokens)} tokens per core"] if tokens[0] != tokens[1] else []
    return "; ".join([*found, *([f"remat {few.remat} and {many.remat}"] if few.remat != many.remat else [])])


def available(plans: Plans) -> int | None:
    """What the compiler has said is available of a v3 core's memory; it says so only where a model does not fit."""
    return max(
        (plan.memory.available for plan in plans.values() if not plan.fits and plan.topology.startswith("v3:")),
        default=None,
    )


def compute_by_part(plan: Plan) -> dict[str, float]:
    """Seconds by the names of PARTS; `plan` fits a slice with a clock."""
    return _grouped({part: cycles / V3.clock for part, cycles in plan.cycles_by_part.items()}, PARTS)


def collectives_by_kind(plan: Plan) -> dict[str, float]:
    """Seconds by the names of EXCHANGES."""
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


def peak_seconds(plan: Plan) -> float:
    """The time that the model's own operations take at the cores' peak."""
    return plan.model_flops / (plan.cores * V3.peak_flops)


def roofline_seconds(plan: Plan) -> float:
    """The model's own operations at the cores' peak, and the exchanges as our model of the links has them."""
    return peak_seconds(plan) + plan.collective_seconds


def implied_utilisation(plan: Plan, steps_per_second: str) -> float:
    """The share of the cores' peak that so many of a plan's steps per second would be."""
    return peak_seconds(plan) * float(steps_per_second)
