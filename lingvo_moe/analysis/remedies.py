"""Remedies for a plan that does not fit: those settings that change something for it, and how many devices would do."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

from lingvo_moe.analysis import layout_space
from lingvo_moe.analysis.cost_model import CostModel, Estimate
from lingvo_moe.analysis.hardware import hardware_of
from lingvo_moe.analysis.plan import Plan
from lingvo_moe.engines import topology
from lingvo_moe.engines.cluster import MAX_GPUS_PER_NODE, Cluster
from lingvo_moe.engines.topology import GENERATIONS, Slice
from lingvo_moe.errors import UserError
from lingvo_moe.experiment import Experiment
from lingvo_moe.sharding.layout import AUTO, DeviceMesh, Layout

_MAX_DOUBLINGS = 8
# The layouts of one mesh axis that replicate dense weights.
_REPLICATING = (AUTO, "gshard", "gshard_few")


@dataclasses.dataclass(frozen=True)
class Sufficient:
    """The smallest slice or cluster that the cost model predicts a training step to fit.

    Attributes:
      topology: its name.
      mesh: of its devices.
      estimate: the prediction.
    """

    topology: str
    mesh: DeviceMesh
    estimate: Estimate


def of(plan: Plan) -> list[str]:
    """Returns what may make a plan fit that does not, a phrase each: only what differs from the plan's settings."""
    trains, mesh = plan.program == "train", DeviceMesh.parse(plan.mesh)
    found = []
    if plan.batch_size > Layout.of(mesh, plan.layout).num_shards("B", "B"):
        field = "input.batch_size" if trains else "decoding_batch"
        found.append(f"a smaller --set {field}=... (now {plan.batch_size})")
    if trains and plan.remat != "full" and not _is_of_volumes(plan):
        found.append(f"--set model.remat=full (now {plan.remat})")
    if plan.activation_dtype != "bfloat16":
        found.append(f"--set model.activation_dtype=bfloat16 (now {plan.activation_dtype})")
    found += () if _is_of_volumes(plan) else _layouts(plan, mesh)
    return [*found, f"more {plan.device}s"]


def search_of(plan: Plan) -> str:
    """Returns the flag that tries settings for a plan that does not fit; empty for what has no search."""
    if plan.program != "train" or hardware_of(plan.topology).clock is None:
        return ""
    return f"--search={'' if _is_of_volumes(plan) else 'remat,'}mesh,{'groups,' if plan.num_experts else ''}batch"


def sufficient(experiment: Experiment, target: Slice | Cluster) -> Sufficient | None:
    """Predicts how many devices a training step fits that does not fit a target, with the batch and layout that it has.

    Args:
      experiment: on a mesh of the target's devices.
      target: the slice or cluster that is too small; powers of two times its size are tried.

    Returns:
      The smallest; None for a model that the cost model does not know, and where no size is legal, exists and fits.
    """
    for doublings in range(1, _MAX_DOUBLINGS + 1):
        larger = _larger(target, doublings)
        if isinstance(larger, Slice) and not topology.exists(larger.generation, larger.chips):
            return None
        for mesh in _meshes(experiment.mesh, doublings):
            own = dataclasses.replace(experiment, mesh=mesh)
            try:
                own.check()
                estimate = CostModel(own, larger).estimate(layout_space.registered(own))
            except UserError:
                continue
            if estimate.fits:
                return Sufficient(larger.name, mesh, estimate)
    return None


def _is_of_volumes(plan: Plan) -> bool:
    """Whether the model is a U-Net, which has neither checkpoint policies nor the logical axes of a Transformer."""
    return plan.unit == "voxels"


def _layouts(plan: Plan, mesh: DeviceMesh) -> Iterator[str]:
    """What shards weights that a layout of one axis replicates."""
    one_axis = len(mesh.shape) == 1 and mesh.size > 1
    if one_axis and plan.layout in _REPLICATING:
        yield "--set layout=gshard_sharded_update, which shards dense weights too"
    if one_axis and plan.layout in (*_REPLICATING, "gshard_sharded_update") and (columns := _divisor(mesh.size)) > 1:
        yield f"a mesh of two axes, for instance --mesh={mesh.size // columns}x{columns} --set layout=gspmd"


def _divisor(size: int) -> int:
    """Returns the greatest divisor up to the square root."""
    return max(divisor for divisor in range(1, math.isqrt(size) + 1) if size % divisor == 0)


def _meshes(mesh: DeviceMesh, doublings: int) -> Iterator[DeviceMesh]:
    """Yields the meshes whose axes are powers of two times those of a mesh, and `2**doublings` times in all."""
    for powers in itertools.product(range(doublings, -1, -1), repeat=len(mesh.shape)):
        if sum(powers) == doublings:
            yield DeviceMesh(tuple(size << power for size, power in zip(mesh.shape, powers)), mesh.axis_names)


def _larger(target: Slice | Cluster, doublings: int) -> Slice | Cluster:
    """Returns a description of `2**doublings` times as many devices: full nodes, or chips in the squarest shape."""
    devices = tuple(range(len(target.devices) << doublings))  # the cost model counts them, and asks no compiler
    if isinstance(target, Cluster):
        within = doublings
        while within and target.gpus_per_node << within > MAX_GPUS_PER_NODE:
            within -= 1
        nodes, gpus = target.nodes << doublings - within, target.gpus_per_node << within
        name = f"{target.generation}:{nodes}x{gpus}"
        return dataclasses.replace(target, name=name, nodes=nodes, gpus_per_node=gpus, devices=devices)
    chips = list(target.chips)
    is_flat = GENERATIONS[target.generation].endswith("x1") or len(chips) == 2
    for _ in range(doublings):
        shortest = min(range(2 if is_flat else len(chips)), key=chips.__getitem__)
        chips[shortest] *= 2
    name = f"{target.generation}:{'x'.join(map(str, chips))}"
    return dataclasses.replace(target, name=name, chips=tuple(chips), devices=devices)
