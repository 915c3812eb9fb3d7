"""Miniatures of the largest models: the same layers, layout and policies with small dimensions on eight cores.

They compile in seconds. The partitioner's collectives depend on the structure and not on sizes, so the miniature's
collectives, by kind and count, are those of the large model; testdata/golden/collectives has them.
"""

from __future__ import annotations

from lingvo_moe import experiment
from lingvo_moe.analysis import plan
from lingvo_moe.engines.topology import Slice
from lingvo_moe.experiment import Experiment
from lingvo_moe.models.segmentation import UNet
from lingvo_moe.models.transformer import Transformer
from lingvo_moe.models.translation import Translation
from lingvo_moe.sharding.layout import DeviceMesh, Layout

_SLICE = "v3:2x2x1"
_MESHES = {1: DeviceMesh((8,)), 2: DeviceMesh((4, 2)), 3: DeviceMesh((2, 2, 2))}
# How often a layer pattern is repeated: more than once, to distinguish collectives in loops from others.
_REPEATS = 3


def of(name: str) -> Experiment:
    """Returns the miniature of a registered model."""
    large = experiment.get(name)
    model, mesh = large.model, _MESHES[len(large.mesh.shape)]
    sizes = _of_volumes() if isinstance(model, UNet) else _of_transformer(model, Layout.of(mesh, large.layout))
    if large.decodes:
        sizes["decoding_batch"] = 16
    # No collective depends on these; models that differ in nothing else have the same miniature.
    sizes |= {"training.steps": 1, "input.shards": 1}
    return experiment.get(name, [f"{path}={size}" for path, size in sizes.items()], mesh)


def _of_volumes() -> dict[str, object]:
    """The sizes of a U-Net: two levels have each kind of operator, and every further one adds equal collectives."""
    return {"model.num_layers": 2, "model.base_channels": 4, "input.size": "16,16,16", "input.batch_size": 4}


def _of_transformer(model: Transformer, layout: Layout) -> dict[str, object]:
    sizes: dict[str, object] = {
        "model.model_dim": 128,
        "model.hidden_dim": 256,
        "model.num_heads": 4,
        "model.head_dim": 32,
        "model.num_layers": _REPEATS * model.layers_per_repeat,
        "model.num_groups": 16,
        "model.aux_loss_weight": 1.0,
        "input.batch_size": 16,
    }
    if model.pipeline != "none":
        stages = layout.num_shards("P", "P")
        sizes |= {"model.stages": stages, "model.microbatches": stages}
        sizes["model.num_layers"] = 2 * stages * model.layers_per_repeat
    if model.num_experts:
        sizes["model.num_experts"] = layout.num_shards("E", "E")
        sizes["model.inference_min_capacity"] = 0  # decoding's alone
        if model.inference_num_groups:
            sizes["model.inference_num_groups"] = layout.num_shards("G", "G")
    if isinstance(model, Translation):
        sizes["model.num_encoder_layers"] = 0  # as many as the decoder's, in every miniature
    sizes |= {f"model.{side}_vocabulary": 512 for side in model.vocabularies}
    sizes |= {f"input.{side}_length": 32 for side in model.sides}
    return sizes


def make_plan(miniature: Experiment) -> plan.Plan:
    """Returns the plan of a miniature's training step on eight TPU v3 cores."""
    return plan.make("miniature", miniature, Slice.of(_SLICE))


def collectives(planned: plan.Plan) -> str:
    """Returns a line per kind of collective and size of its groups: how many run in a training step."""
    lines = (f"{found.kind} among {found.group}: {found.runs}\n" for found in planned.collectives)
    return "".join(lines) or "none\n"
