"""Searches for the fastest settings that fit: `plan --search` compiles candidates and keeps the best.

It varies one kind of setting at a time, in the order of DIMENSIONS, with the best values found so far for the others: a
full product would take hours. It compares tokens per second, because the batch may change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from lingvo_moe.analysis import plan
from lingvo_moe.analysis.hardware import hardware_of
from lingvo_moe.engines.cluster import Cluster
from lingvo_moe.engines.topology import Slice
from lingvo_moe.errors import UserError, did_you_mean
from lingvo_moe.experiment import Experiment
from lingvo_moe.layers.checkpoint_policy import REMAT
from lingvo_moe.sharding.layout import DeviceMesh

LAYOUT = "layout"  # see `layout_search`, which varies remat and mesh in any case
# The candidates for the size of a batch and the number of groups, as multiples of the model's own.
_FACTORS = (0.25, 0.5, 2, 4)


@dataclasses.dataclass(frozen=True)
class Trial:
    """One candidate with its plan, or the reason why there is none.

    Attributes:
      changes: of the unchanged settings, each `field=value`; a mesh is `mesh=AxB`. The plan's are those of the
        registered model, with the user's.
      plan: None if the settings are not compatible.
      refusal: the reason in that case.
    """

    changes: tuple[str, ...]
    plan: plan.Plan | None
    refusal: str = ""

    @property
    def tokens_per_second(self) -> float:
        """0 if it does not fit or its time is unknown."""
        return (self.plan.tokens_per_second or 0.0) if self.plan and self.plan.fits else 0.0


def check_dimensions(names: Sequence[str]):
    """Raises UserError for a name that is neither in DIMENSIONS nor LAYOUT, or one that a layout's search lacks."""
    known = (*DIMENSIONS, LAYOUT)
    for name in names:
        if name not in known:
            raise UserError(
                f"--search={name}: no such dimension.{did_you_mean(name, known)} Known: {', '.join(known)}."
            )
    if LAYOUT in names and "groups" in names:
        raise UserError(f"--search={','.join(names)}: a search for layouts does not vary groups; leave that out.")


def check_clock(target: Slice | Cluster):
    """Raises UserError where plans have no time to compare, because the clock of a generation is not published."""
    if hardware_of(target.name).clock is None:
        raise UserError(
            f"--search compares the times of steps, which plans for {target.generation} do not have: its clock is not "
            f"published. Leave --search out to see memory and cycles, or predict with --search=layout --top=0."
        )


def search(
    name: str,
    target: Slice | Cluster,
    dimensions: Sequence[str],
    assignments: Sequence[str],
    build: Callable[[Sequence[str]], Experiment],
) -> Iterator[Trial]:
    """Yields every trial as soon as it is compiled; the first has the unchanged settings.

    Args:
      name: of the model.
      target: the slice or cluster.
      dimensions: names of DIMENSIONS, in any order.
      assignments: the user's `field=value`s, which all trials have.
      build: returns the experiment of a list of assignments; raises UserError if they are not compatible.

    Raises:
      UserError: the unchanged settings are not compatible, or as `check_clock`.
    """
    check_clock(target)
    seen: set[tuple[str, ...]] = set()
    start = build(assignments)
    best = _try(name, target, start, assignments, ())
    yield best
    for dimension in (d for d in DIMENSIONS if d in dimensions):
        settings = build([*assignments, *best.changes])
        for value in DIMENSIONS[dimension](settings, target):
            changes = _changed(best.changes, value)
            if changes in seen:
                continue
            seen.add(changes)
            try:
                trial = _try(name, target, build([*assignments, *changes]), assignments, changes)
            except UserError as error:
                trial = Trial(changes, None, str(error))
            yield trial
            if trial.tokens_per_second > best.tokens_per_second:
                best = trial


def _try(
    name: str, target: Slice | Cluster, experiment: Experiment, assignments: Sequence[str], changes: tuple[str, ...]
) -> Trial:
    return Trial(changes, plan.make(name, experiment, target, "train", (*assignments, *changes)))


def _changed(changes: tuple[str, ...], value: str) -> tuple[str, ...]:
    field = value.partition("=")[0]
    return tuple(sorted([*(change for change in changes if change.partition("=")[0] != field), value]))


def _remats(experiment: Experiment, target: Slice | Cluster) -> Iterator[str]:
    del target
    policies = REMAT if not experiment.model.unroll else ()
    return (f"model.remat={policy}" for policy in policies if policy != experiment.model.remat)


def _meshes(experiment: Experiment, target: Slice | Cluster) -> Iterator[str]:
    """Yields all meshes of one axis, or of two axes with a power of two, that have the target's number of devices."""
    count = len(target.devices)
    sizes = [
        size for size in (2**power for power in range(1, count.bit_length())) if count % size == 0 and size < count
    ]
    shapes = [(count,), *((count // size, size) for size in sizes)]
    return (f"mesh={DeviceMesh(shape)}" for shape in shapes if shape != experiment.mesh.shape)


def _groups(experiment: Experiment, target: Slice | Cluster) -> Iterator[str]:
    del target
    if not experiment.model.num_experts:
        return iter(())
    return (f"model.num_groups={number}" for number in _multiples(experiment.model.num_groups))


def _batches(experiment: Experiment, target: Slice | Cluster) -> Iterator[str]:
    del target
    return (f"input.batch_size={size}" for size in _multiples(experiment.input.batch_size))


def _multiples(own: int) -> Iterator[int]:
    return (int(own * factor) for factor in _FACTORS if own * factor >= 1)


# The dimensions of the search: functions that yield the assignments to try besides the current one.
DIMENSIONS = {"remat": _remats, "mesh": _meshes, "groups": _groups, "batch": _batches}
