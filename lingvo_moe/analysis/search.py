"""Which settings are fastest among those that fit: `plan --search` compiles one after another and keeps the best.

One kind of setting is tried at a time, all others being the best found so far, in the order of DIMENSIONS: a full product
would take hours. What is compared is tokens per second, as the batch may change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from lingvo_moe.analysis import plan
from lingvo_moe.engines.topology import Slice
from lingvo_moe.errors import UserError, did_you_mean
from lingvo_moe.experiment import Experiment
from lingvo_moe.layers.repeat import REMAT
from lingvo_moe.sharding.layout import DeviceMesh

# The sizes of a batch and of its groups that are tried, as multiples of the model's own.
_FACTORS = (0.25, 0.5, 2, 4)


@dataclasses.dataclass(frozen=True)
class Trial:
    """One attempt: what was tried, and its plan, or why there is none.

    Attributes:
      changes: of the registered model, each `field=value`; a mesh is `mesh=AxB`.
      plan: None where the settings do not go together.
      refusal: why, then.
    """

    changes: tuple[str, ...]
    plan: plan.Plan | None
    refusal: str = ""

    @property
    def tokens_per_second(self) -> float:
        """0 where it does not fit."""
        return (
            self.plan.tokens / self.plan.step_seconds
            if self.plan and self.plan.fits and self.plan.step_seconds
            else 0.0
        )


def check_dimensions(names: Sequence[str]):
    """Raises UserError for a name that is none of DIMENSIONS."""
    for name in names:
        if name not in DIMENSIONS:
            raise UserError(
                f"--search={name}: nothing to vary by that name.{did_you_mean(name, DIMENSIONS)} Known: "
                f"{', '.join(DIMENSIONS)}."
            )


def search(
    name: str,
    tpu: Slice,
    dimensions: Sequence[str],
    assignments: Sequence[str],
    build: Callable[[Sequence[str]], Experiment],
) -> Iterator[Trial]:
    """Yields every trial as soon as it is compiled; the first is of the settings as they are.

    Args:
      name: of the model.
      tpu: the slice.
      dimensions: names of DIMENSIONS, in any order.
      assignments: `field=value`s that hold for all trials.
      build: makes the experiment of a list of assignments; raises UserError for those that do not go together.

    Raises:
      UserError: what is searched from cannot be built.
    """
    seen: set[tuple[str, ...]] = set()
    start = build(assignments)
    best = _try(name, tpu, start, ())
    yield best
    for dimension in (d for d in DIMENSIONS if d in dimensions):
        settings = build([*assignments, *best.changes])
        for value in DIMENSIONS[dimension](settings, tpu):
            changes = _changed(best.changes, value)
            if changes in seen:
                continue
            seen.add(changes)
            try:
                trial = _try(name, tpu, build([*assignments, *changes]), changes)
            except UserError as error:
                trial = Trial(changes, None, str(error))
            yield trial
            if trial.tokens_per_second > best.tokens_per_second:
                best = trial


def _try(name: str, tpu: Slice, experiment: Experiment, changes: tuple[str, ...]) -> Trial:
    return Trial(changes, plan.make(name, experiment, tpu, "train", changes))


def _changed(changes: tuple[str, ...], value: str) -> tuple[str, ...]:
    field = value.partition("=")[0]
    return tuple(sorted([*(change for change in changes if change.partition("=")[0] != field), value]))


def _remats(experiment: Experiment, tpu: Slice) -> Iterator[str]:
    del tpu
    policies = REMAT if not experiment.model.unroll else ()
    return (f"model.remat={policy}" for policy in policies if policy != experiment.model.remat)


def _meshes(experiment: Experiment, tpu: Slice) -> Iterator[str]:
    """All meshes of one or two axes of powers of two, and the model's own number of cores otherwise."""
    cores = len(tpu.devices)
    sizes = [
        size for size in (2**power for power in range(1, cores.bit_length())) if cores % size == 0 and size < cores
    ]
    shapes = [(cores,), *((cores // size, size) for size in sizes)]
    return (f"mesh={DeviceMesh(shape)}" for shape in shapes if shape != experiment.mesh.shape)


def _groups(experiment: Experiment, tpu: Slice) -> Iterator[str]:
    del tpu
    if not experiment.model.num_experts:
        return iter(())
    groups = experiment.model.num_groups
    return (f"model.num_groups={int(groups * factor)}" for factor in _FACTORS)


def _batches(experiment: Experiment, tpu: Slice) -> Iterator[str]:
    del tpu
    return (f"input.batch_size={int(experiment.input.batch_size * factor)}" for factor in _FACTORS)


# What can be varied: by name, the assignments to try beside the current ones.
DIMENSIONS = {"remat": _remats, "mesh": _meshes, "groups": _groups, "batch": _batches}
