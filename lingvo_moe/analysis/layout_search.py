"""Finds the fastest layout: `plan --search=layout` predicts every legal layout, and compiles the best few.

The analytical cost model (`cost_model`) ranks all of `layout_space`. Among the best, those that differ little are one
choice: of candidates with the same mesh, policy and schedule, and times within a hundredth, the first is compiled. The
compiler decides: what does not fit is marked, and the order of the compiled ones is that of their plans.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from lingvo_moe.analysis import layout_space, plan
from lingvo_moe.analysis.cost_model import CostModel, Estimate
from lingvo_moe.analysis.layout_space import Candidate, Space
from lingvo_moe.engines.cluster import Cluster
from lingvo_moe.engines.topology import Slice
from lingvo_moe.errors import UserError
from lingvo_moe.experiment import Experiment
from lingvo_moe.layers.checkpoint_policy import REMAT
from lingvo_moe.sharding.layout import DeviceMesh

# The cost model's error of memory: what it predicts up to this much above a device's memory may fit.
MEMORY_TOLERANCE = 1.05
_ALIKE = 0.01
# A layout whose first policy and schedule takes as many times the fastest step is not pursued: recomputing more, or
# more microbatches, do not make up for it.
_SLOWER = 3.0
_BATCH_FACTORS = (0.5, 1, 2, 4)
_PINNED = ("remat", "pipeline", "stages", "microbatches")


@dataclasses.dataclass(frozen=True)
class Found:
    """A candidate of the search.

    Attributes:
      candidate: with which settings.
      changes: of the experiment, each `field=value`; none for the model's own settings.
      estimate: the cost model's prediction.
      plan: the compiled one; None if it was not compiled.
      refusal: why it could not be compiled.
    """

    candidate: Candidate
    changes: tuple[str, ...]
    estimate: Estimate
    plan: plan.Plan | None = None
    refusal: str = ""

    @property
    def may_fit(self) -> bool:
        """Whether a device has the memory, as far as the cost model knows."""
        return self.estimate.bytes <= MEMORY_TOLERANCE * self.estimate.available

    @property
    def tokens_per_second(self) -> float:
        """The speed by the plan; 0 if there is none that fits."""
        return (self.plan.tokens_per_second or 0.0) if self.plan and self.plan.fits else 0.0


@dataclasses.dataclass(frozen=True)
class Ranking:
    """All candidates, ranked by the cost model.

    Attributes:
      own: the experiment's settings; None where they are not legal on its mesh, as a layout for another number of axes.
      best: those that may fit, the fastest first.
      num_candidates: all legal ones, with those that do not fit. Of a layout that is many times slower than the
        fastest, not all policies and schedules are predicted.
    """

    own: Found | None
    best: tuple[Found, ...]
    num_candidates: int

    def num_faster(self, than: Found) -> int:
        """Returns how many candidates are predicted to be faster than another."""
        return sum(found.estimate.tokens_per_second > than.estimate.tokens_per_second for found in self.best)

    def choices(self) -> Iterator[Found]:
        """Yields candidates in order, of those that differ little the first alone."""
        kept: dict[tuple, float] = {}
        for found in self.best:
            candidate, speed = found.candidate, found.estimate.tokens_per_second
            key = (candidate.mesh.shape, candidate.remat, candidate.pipeline, candidate.microbatches)
            key += (candidate.stages, candidate.batch_size)
            if key not in kept or speed < kept[key] * (1 - _ALIKE):
                kept[key] = speed
                yield found


def space_of(
    experiment: Experiment, devices: int, assignments: Sequence[str], mesh: DeviceMesh | None, varies_batch: bool
) -> Space:
    """Returns the space of a search: what the user has set stays as it is.

    Args:
      experiment: with the assignments.
      devices: of the slice or cluster.
      assignments: the user's `field=value`s.
      mesh: the user's, if any.
      varies_batch: whether to try other batches, too.

    Raises:
      UserError: a layout or mesh is assigned, which the search is to find.
    """
    names = [assignment.partition("=")[0].strip().rpartition(".")[2] for assignment in assignments]
    for name, remedy in (("layout", "leave out --set layout"), ("mesh", "use --mesh to try one mesh alone")):
        if name in names:
            raise UserError(f"--set {name}=...: --search=layout looks for it; {remedy}.")
    model, batch = experiment.model, experiment.input.batch_size
    fixed = {name: getattr(model, name) for name in _PINNED if name in names}
    return Space(
        devices,
        tuple(int(batch * factor) for factor in _BATCH_FACTORS if batch * factor >= 1) if varies_batch else (batch,),
        mesh,
        (fixed["remat"],) if "remat" in fixed else REMAT,
        (fixed["pipeline"],) if "pipeline" in fixed else Space.pipelines,
        fixed.get("stages"),
        fixed.get("microbatches"),
    )


def rank(
    experiment: Experiment,
    target: Slice | Cluster,
    space: Space,
    track: Callable[[Iterable[Candidate]], Iterable[Candidate]] = lambda candidates: candidates,
) -> Ranking:
    """Predicts every candidate.

    Args:
      experiment: its own settings need not be legal.
      target: the slice or cluster.
      space: what varies.
      track: shows progress.

    Raises:
      UserError: the space is empty, nothing in it fits, or the model's parts are not known.
    """
    model = CostModel(experiment, target)
    own = _own(experiment, target, model)
    best: list[Found] = []
    fastest, least, count = 0.0, float("inf"), 0
    every = layout_space.candidates(experiment, space)
    every = itertools.chain([next(every)], every)  # an empty space is an error before any progress
    for _, group in itertools.groupby(track(every), _of_layout):
        bound: Estimate | None = None
        for candidate in group:
            count += 1
            if bound and bound.tokens_per_second * _SLOWER < fastest:
                continue  # as are the other policies and schedules of this layout
            if not model.may_fit(candidate):
                continue
            estimate = model.estimate(candidate)
            bound, least = bound or estimate, min(least, estimate.bytes)
            found = Found(candidate, candidate.changes(experiment), estimate)
            if found.may_fit:
                fastest = max(fastest, estimate.tokens_per_second)
                best.append(found)
    if not best:
        raise UserError(
            f"--search=layout: no layout fits a device of {target.name}, of {count:,} legal ones, by the cost model"
            + (f"; the least memory is {least / 2**30:.1f} GiB" if least < float("inf") else "")
            + ". Use a larger --topology, a smaller --set input.batch_size=..., or leave out --mesh and --set."
        )
    best.sort(key=lambda found: (-found.estimate.tokens_per_second, found.estimate.bytes))
    return Ranking(own, tuple(best), count)


def _own(experiment: Experiment, target: Slice | Cluster, model: CostModel) -> Found | None:
    """The experiment's settings; None where they are not legal on the target."""
    try:
        target.check(experiment.mesh)
        experiment.check()
    except UserError:
        return None
    own = layout_space.registered(experiment)
    return Found(own, (), model.estimate(own))


def _of_layout(candidate: Candidate) -> tuple:
    return candidate.layout, candidate.batch_size, candidate.pipeline


def compile_best(
    name: str,
    target: Slice | Cluster,
    ranking: Ranking,
    build: Callable[[Sequence[str]], Experiment],
    budget_seconds: float,
    top: int,
    assignments: Sequence[str] = (),
) -> Iterator[Found]:
    """Compiles the experiment's own settings, if they are legal, and the best choices; yields each with its plan.

    Args:
      name: of the model.
      target: the slice or cluster.
      ranking: of `rank`.
      build: returns the experiment of a list of changes; raises UserError if they are not compatible.
      budget_seconds: no compilation starts that, as long as the longest so far, would exceed it.
      top: the number of choices to compile.
      assignments: the user's, for the plans.
    """
    own = [ranking.own] if ranking.own else []
    others = (choice for choice in ranking.choices() if not any(_is_own(choice, one) for one in own))
    chosen = [*own, *itertools.islice(others, top)]
    start, longest = time.monotonic(), 0.0
    for found in chosen:
        started = time.monotonic()
        if started - start + longest > budget_seconds:
            return
        try:
            made = plan.make(name, build(found.changes), target, "train", (*assignments, *found.changes))
            yield dataclasses.replace(found, plan=made)
        except UserError as error:
            yield dataclasses.replace(found, refusal=str(error))
        longest = max(longest, time.monotonic() - started)


def _is_own(found: Found, own: Found) -> bool:
    """Whether a candidate shards everything as the experiment's own settings do."""
    settings = [dataclasses.replace(one.candidate, layout=own.candidate.layout) for one in (found, own)]
    same_mesh = found.candidate.mesh == own.candidate.mesh
    return settings[0] == settings[1] and same_mesh and found.estimate == own.estimate
