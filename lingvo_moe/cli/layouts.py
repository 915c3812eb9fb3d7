"""`plan --search=layout`: predicts all layouts, compiles the best within the budget, prints both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lingvo_moe.analysis import layout_search, layout_text, search
from lingvo_moe.analysis.layout_space import Candidate
from lingvo_moe.analysis.plan import Plan
from lingvo_moe.cli.run_config import PlanConfig
from lingvo_moe.engines.cluster import Cluster
from lingvo_moe.engines.topology import Slice
from lingvo_moe.errors import UserError
from lingvo_moe.experiment import Experiment
from lingvo_moe.experiment import get as get_experiment
from lingvo_moe.sharding.layout import DeviceMesh
from lingvo_moe.utils import progress

# The flags of `plan` that select the devices, in the words of a remedy.
_DEVICE_FLAGS = "--mesh, or another --topology,"


def planned(name: str, assignments: Sequence[str], mesh: DeviceMesh | None = None) -> Experiment:
    """Returns the experiment to plan; raises UserError as `experiment.get`, with remedies that fit `plan`."""
    return get_experiment(name, list(assignments), mesh, _DEVICE_FLAGS)


def find(config: PlanConfig, own: Experiment, target: Slice | Cluster) -> Plan | None:
    """Prints the search; returns the plan of the fastest, None with --top=0.

    Args:
      config: of the command.
      own: the model's own settings on the target's mesh, unchecked: it need not be legal.
      target: the slice or cluster.

    Raises:
      UserError: no layout is legal or fits, nothing was compiled, or plans for the target have no times.
    """
    if config.json and not config.top:
        raise UserError("--top=0 compiles nothing, so there is no plan for --json; leave one of them out.")
    if config.top:
        search.check_clock(target)
    mesh = config.device_mesh()
    varies_batch = "batch" in config.search
    space = layout_search.space_of(own, len(target.devices), config.assignments, mesh, varies_batch)
    name = config.full_name()
    ranking = layout_search.rank(own, target, space, _tracked)
    print(layout_text.predictions(ranking), flush=True)
    if not config.top:
        return None
    found = []
    with progress.bar("compiling the best layouts", config.top + bool(ranking.own), "layouts") as advance:
        for one in layout_search.compile_best(
            name,
            target,
            ranking,
            lambda changes: planned(name, [f"mesh={own.mesh}", *config.assignments, *changes]),
            60 * config.budget,
            config.top,
            config.assignments,
        ):
            found.append(one)
            advance()
            print(layout_text.compiled(one), flush=True)
    if not found:
        raise UserError(f"--budget={config.budget:g}: no time to compile anything; use more minutes, or --top=0.")
    print(layout_text.results(found))
    plans = [one.plan for one in sorted(found, key=lambda one: -one.tokens_per_second) if one.plan]
    if not plans:
        raise UserError(f"all {len(found)} candidates were refused, the last one because: {found[-1].refusal}")
    return plans[0]


def _tracked(candidates: Iterable[Candidate]) -> Iterable[Candidate]:
    return progress.track(candidates, "predicting layouts", unit="layouts")
