"""The legal layouts of a model on a number of devices: which logical axes are sharded along which mesh axes.

A structure is a set of axis rules for a number of mesh axes; it is legal where no tensor of the model has two logical
axes on one mesh axis. A candidate adds the sizes of the mesh's axes, each of which divides whatever it shards, the
checkpoint policy, and the stages and microbatches of a pipeline.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from lingvo_moe import tree
from lingvo_moe.analysis import model_parts
from lingvo_moe.analysis.model_parts import GATE
from lingvo_moe.errors import UserError
from lingvo_moe.experiment import Experiment
from lingvo_moe.layers.checkpoint_policy import REMAT
from lingvo_moe.models.translation import Translation
from lingvo_moe.sharding.layout import AxisRule, DeviceMesh, Layout, mesh_axis_names, rules_text

_MAX_AXES = 3
_MAX_MICROBATCHES_PER_STAGE = 8
_MAX_ACCUMULATED = 16  # microbatches without a pipeline
# Logical axes of activations that are sharded together: a reshape makes groups of the batch's tokens.
_BATCH = "BG"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A layout with the settings that it is chosen together with.

    Attributes:
      layout: mesh and axis rules.
      remat, pipeline, stages, microbatches: see `Transformer`.
      batch_size: of the input.
    """

    layout: Layout
    remat: str
    batch_size: int
    pipeline: str = "none"
    stages: int = 1
    microbatches: int = 1

    @property
    def mesh(self) -> DeviceMesh:
        """The device mesh."""
        return self.layout.mesh

    @property
    def accumulates(self) -> bool:
        """Whether the gradients of several microbatches are summed."""
        return self.microbatches > 1

    def changes(self, experiment: Experiment) -> tuple[str, ...]:
        """Returns the `field=value`s that make an experiment this candidate; those of equal values are left out."""
        model = experiment.model
        values = {
            "mesh": (str(self.mesh), str(experiment.mesh)),
            "layout": (rules_text(self.layout.rules), experiment.layout),
            "model.remat": (self.remat, model.remat),
            "model.pipeline": (self.pipeline, model.pipeline),
            "model.stages": (self.stages, model.stages),
            "model.microbatches": (self.microbatches, model.microbatches),
            "input.batch_size": (self.batch_size, experiment.input.batch_size),
        }
        return tuple(f"{field}={own}" for field, (own, others) in values.items() if own != others)


@dataclasses.dataclass(frozen=True)
class Space:
    """What may vary.

    Attributes:
      devices: the size of every mesh.
      batch_sizes: to try.
      mesh: the only mesh; None for all shapes of one to three axes.
      remats, pipelines: to try.
      stages, microbatches: the only number; None for all.
    """

    devices: int
    batch_sizes: tuple[int, ...]
    mesh: DeviceMesh | None = None
    remats: tuple[str, ...] = REMAT
    pipelines: tuple[str, ...] = ("none", "gpipe", "circular")
    stages: int | None = None
    microbatches: int | None = None


@dataclasses.dataclass(frozen=True)
class Structure:
    """Legal axis rules.

    Attributes:
      rules: for meshes of `len(divisors)` axes.
      divisors: of each mesh axis, the greatest number that divides all sizes that it shards, the batch's excepted; 0 if
        it shards the batch alone.
      batch_axes: the mesh axes of the batch's logical axes B and G, outside of stages and within them; -1 for none.
    """

    rules: tuple[AxisRule, ...]
    divisors: tuple[int, ...]
    batch_axes: tuple[int, int]


def registered(experiment: Experiment) -> Candidate:
    """Returns the candidate that the experiment is."""
    model = experiment.model
    return Candidate(
        Layout.of(experiment.mesh, experiment.layout),
        model.remat,
        experiment.input.batch_size,
        model.pipeline,
        model.stages,
        model.microbatches,
    )


def candidates(experiment: Experiment, space: Space) -> Iterator[Candidate]:
    """Yields every legal candidate once.

    Raises:
      UserError: at the end, if there was none; or a model whose parts are not known.
    """
    model_parts.model_of(experiment)
    is_empty = True
    for count in range(1, _MAX_AXES + 1) if space.mesh is None else (len(space.mesh.shape),):
        for has_stages in (False, True):
            pipelines = [pipeline for pipeline in space.pipelines if (pipeline != "none") == has_stages]
            structures = _structures(experiment, count, has_stages) if pipelines else ()
            for mesh in _meshes(space, count):
                for candidate in _on_mesh(experiment, space, structures, mesh, pipelines):
                    is_empty = False
                    yield candidate
    if is_empty:
        numbers = {"stages": space.stages, "microbatches": space.microbatches}
        set_to = "".join(f", {name} {number}" for name, number in numbers.items() if number is not None)
        where = f"the mesh {space.mesh}" if space.mesh else f"a mesh of {space.devices} devices"
        raise UserError(
            f"--search=layout: no legal layout on {where}: no assignment of logical axes has sizes that its axes "
            f"divide (batches of {', '.join(map(str, space.batch_sizes))} rows, remat {', '.join(space.remats)}, "
            f"pipeline {', '.join(space.pipelines)}{set_to}). Leave out --mesh or some of --set, or change --topology."
        )


def _on_mesh(
    experiment: Experiment, space: Space, structures: Sequence[Structure], mesh: DeviceMesh, pipelines: Sequence[str]
) -> Iterator[Candidate]:
    for structure in structures:
        if any(divisor % size for divisor, size in zip(structure.divisors, mesh.shape)):
            continue
        layout = Layout(mesh, structure.rules)
        for batch_size, pipeline in itertools.product(space.batch_sizes, pipelines):
            for stages, microbatches in _schedules(experiment, space, mesh, pipeline, batch_size):
                if not _divides_batch(experiment, structure, mesh, batch_size, microbatches):
                    continue
                for remat in space.remats:
                    # A microbatch's layers are always recomputed (`layers.pipeline`).
                    if remat != "none" or (pipeline == "none" and microbatches == 1):
                        yield Candidate(layout, remat, batch_size, pipeline, stages, microbatches)


def _schedules(
    experiment: Experiment, space: Space, mesh: DeviceMesh, pipeline: str, batch_size: int
) -> Iterator[tuple[int, int]]:
    """Yields (stages, microbatches) for a mesh, the first axis of which has the stages of a pipeline."""
    model = model_parts.model_of(experiment)
    stages, most = (1, _MAX_ACCUMULATED) if pipeline == "none" else (mesh.shape[0], 0)
    if isinstance(model, Translation) and model.relative_buckets:  # whose bias is no part of a microbatch
        if pipeline != "none":
            return
        most = 1
    if pipeline != "none":
        repeats = model.repeats.values()
        # All devices would store the layers that their number does not divide.
        if any(count % stages for count in repeats) or (pipeline == "circular" and max(repeats) == stages):
            return
        most = _MAX_MICROBATCHES_PER_STAGE * stages
    if space.stages not in (None, stages):
        return
    for microbatches in (2**power for power in range(most.bit_length())):
        enough = pipeline == "none" or microbatches >= stages
        if enough and batch_size % microbatches == 0 and space.microbatches in (None, microbatches):
            yield stages, microbatches


def _divides_batch(
    experiment: Experiment, structure: Structure, mesh: DeviceMesh, batch_size: int, microbatches: int
) -> bool:
    """Whether the devices divide the batch and the groups, and those of a microbatch (`Experiment.check`)."""
    outside, inside = (mesh.shape[axis] if axis >= 0 else 1 for axis in structure.batch_axes)
    model = experiment.model
    sizes = [batch_size, *([model.num_groups] if model.num_experts else [])]
    return all(size % math.lcm(microbatches * inside, outside) == 0 for size in sizes)


def _meshes(space: Space, count: int) -> Iterator[DeviceMesh]:
    """Yields the meshes of `count` axes, each of two devices or more."""
    if space.mesh is not None:
        yield space.mesh
        return
    divisors = [size for size in range(2, space.devices + 1) if space.devices % size == 0]
    for shape in itertools.product(divisors, repeat=count - 1):
        last, remainder = divmod(space.devices, math.prod(shape))
        if not remainder and last > 1:
            yield DeviceMesh((*shape, last))


def _structures(experiment: Experiment, count: int, has_stages: bool) -> tuple[Structure, ...]:
    """Returns the legal structures for `count` mesh axes, the first of which has the stages of a pipeline or not.

    Two sets of rules that shard all tensors alike are one structure.
    """
    found: dict[tuple, Structure] = {}
    tensors = tensors_of(experiment)
    for rules in _rule_sets(experiment, mesh_axis_names(count), has_stages):
        outside = Layout(DeviceMesh((2,) * count), rules)
        try:
            mapping = _mapping(outside, tensors)
            inside = _mapping(outside.within_stages(), tensors) if has_stages else mapping
        except UserError:  # two logical axes of a tensor on one mesh axis
            continue
        # Vectors are of no weight: M alone may be on another axis than in matrices.
        key = tuple(mapped[axes] for mapped in (mapping, inside) for axes in tensors if len(axes.lstrip("Rr")) > 1)
        if key not in found:
            divisors = [_divisor(tensors, (mapping, inside), axis) for axis in range(count)]
            used = tuple(divisor for divisor in divisors if divisor is not None)
            if len(used) == count:
                found[key] = Structure(rules, used, (mapping["BTM"][0], inside["BTM"][0]))
    return tuple(found.values())


def _mapping(layout: Layout, tensors: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {axes: layout.dims_mapping(axes) for axes in tensors}


def _divisor(
    tensors: Mapping[str, tuple[int, ...]], mappings: Sequence[Mapping[str, tuple[int, ...]]], axis: int
) -> int | None:
    """The greatest common divisor of all sizes along a mesh axis except the batch's, which `_divides_batch` checks.

    0, which every number divides, if the batch alone is sharded along the axis; None if nothing is.
    """
    sharded = [
        (axes[mapping[axes].index(axis)], sizes[mapping[axes].index(axis)])
        for axes, sizes in tensors.items()
        for mapping in mappings
        if axis in mapping[axes]
    ]
    return math.gcd(*(size for axis, size in sharded if axis not in _BATCH)) if sharded else None


def tensors_of(experiment: Experiment) -> dict[str, tuple[int, ...]]:
    """Returns logical axes and sizes of all tensors that are annotated: weights, optimizer state, activations."""
    weights = experiment.model.weights()
    declared = [*tree.flatten(weights).values(), *tree.flatten(experiment.optimizer.state(weights)).values()]
    tensors = {weight.logical_axes: weight.shape for weight in declared}
    for part in model_parts.parts_of(experiment, experiment.input.batch_size, 1):
        sizes = dict(part.sizes)
        named = {axes: tuple(sizes[axis] for axis in axes) for axes in part.axes if axes != GATE}
        tensors |= {axes: shape for axes, shape in named.items() if axes not in tensors}
    return tensors


def _rule_sets(experiment: Experiment, names: tuple[str, ...], has_stages: bool) -> Iterator[tuple[AxisRule, ...]]:
    """Yields axis rules, of which not all are legal.

    Each logical axis is on one mesh axis or on none. Of two on one mesh axis the first in a tensor is sharded, so axes
    of weights may share the batch's (weight-update sharding). M may also take the mesh axis that is left.
    """
    stage, free = (names[0], names[1:]) if has_stages else (None, names)
    one = (None, *free)
    fallbacks = [order for size in range(1, len(free) + 1) for order in itertools.permutations(free, size)]
    experts = one if experiment.model.num_experts else (None,)
    for batch, expert, heads, hidden in itertools.product((*names, None), experts, one, one):
        # With three axes or stages there are many: the batch is sharded, and the vocabulary as the hidden dimension.
        is_large = len(names) >= _MAX_AXES or has_stages
        if is_large and batch is None:
            continue
        for vocabulary in (hidden,) if is_large else one:
            for model in (*one, *fallbacks) if len(free) < _MAX_AXES else (None, *fallbacks):
                mesh_axes: dict[str, str | None] = {"BG": batch, "E": expert, "N": heads, "H": hidden, "V": vocabulary}
                mesh_axes |= {"PR": stage} if stage else {}
                mesh_axes |= {"M": model} if isinstance(model, str) else {}
                rules = _rules(names, mesh_axes)
                yield (*rules, AxisRule("M", model, fallback=True)) if isinstance(model, tuple) else rules


def _rules(names: tuple[str, ...], mesh_axes: Mapping[str, str | None]) -> tuple[AxisRule, ...]:
    """The rules of logical axes that are on one mesh axis each."""
    of_axis = {name: "".join(group for group, axis in mesh_axes.items() if axis == name) for name in names}
    return tuple(AxisRule(group, (name,)) for name, group in of_axis.items() if group)
