"""Plans every registered large model at full scale, one by one, into docs/plans; tools.report makes a page of them.

    python -m tools.plan_zoo [--only=m4,sparse_lm.MoE10B32E] [--force]

An existing plan is kept if its request has not changed, unless --force is given. Each plan is made by a process of its
own, `python -m lingvo_moe plan NAME`, and takes one to four minutes of one core; of a U-Net, five to seven, and for v6e
up to thirteen.
"""

from __future__ import annotations

import dataclasses
import pathlib
import subprocess
import sys

from absl import flags

from lingvo_moe import experiment, registry
from lingvo_moe.analysis.plan import Plan
from lingvo_moe.cli import app
from lingvo_moe.engines.topology import v3_slice
from lingvo_moe.errors import UserError
from lingvo_moe.importing import hugging_face
from lingvo_moe.sharding.layout import DeviceMesh
from lingvo_moe.utils import progress
from lingvo_moe.utils.counts import counted

DIRECTORY = pathlib.Path(__file__).parent.parent / "docs" / "plans"
_VALUES = flags.FlagValues()
flags.DEFINE_list("only", [], "prefixes of the names of the plans to make; by default all", flag_values=_VALUES)
flags.DEFINE_boolean("force", False, "make existing plans again, too", flag_values=_VALUES)
# Cores, or weights; models with less of both run on a workstation and are not planned.
_SMALLEST_SLICE, _FEWEST_WEIGHTS = 32, 10**9

_M4_ROWS = ("MoE128E12L", "MoE128E36L", "MoE512E12L", "MoE512E36L", "MoE2048E12L", "MoE2048E36L")
_LARGEST = ("m4.MoE2048E60L", "m4.Dense96L")
_GENERATING = ("dense_lm.Dense64BMesh8x16", "dense_lm.Dense1T", "hybrid_lm.MoE33B8E", "sparse_lm.MoE10B32E")
# Of each model, the clusters of GPUs and slices of newer TPUs to plan it on, and the mesh: the smallest that are
# expected to have enough memory, in powers of two. v5e and v6e have no slices of more than 256 chips. Left out are what
# cannot be made: MoE(128E, 12L) on tpu7x, whose module jaxlib 0.10.2 cannot read, and MoE(2048E, 12L) on h200:8x8, for
# which ptxas needs more than ten minutes, or without optimisations more than 19 GB.
_CLUSTERS = {
    "m4.MoE128E12L": (
        ("h100:4x8", "32"), ("h200:2x8", "16"), ("b200:2x8", "16"),
        ("v4:4x4x4", "128"), ("v5e:16x8", "128"), ("v5p:4x4x2", "32"), ("v6e:8x8", "64"),
    ),
    "m4.MoE128E36L": (("h100:4x8", "32"), ("h200:2x8", "16"), ("b200:1x8", "8"), ("v6e:8x8", "64")),
    "m4.MoE512E12L": (("h100:4x8", "32"), ("h200:4x8", "32"), ("b200:2x8", "16"), ("v6e:16x8", "128")),
    "m4.MoE512E36L": (("h100:8x8", "64"), ("h200:4x8", "32"), ("b200:2x8", "16"), ("v6e:16x16", "256")),
    "m4.MoE2048E12L": (("h100:16x8", "128"), ("b200:8x8", "64")),
    "m4.MoE2048E36L": (("h100:32x8", "256"), ("h200:16x8", "128"), ("b200:8x8", "64"), ("v5p:8x8x4", "256")),
    "m4.MoE2048E60L": (("h100:32x8", "256"), ("h200:16x8", "128"), ("b200:8x8", "64"), ("v5p:8x8x4", "256")),
    "m4.Dense96L": (("h100:16x8", "128"), ("h200:8x8", "64"), ("b200:8x8", "64")),
    "dense_lm.Dense64BMesh8x16": (
        ("h100:4x8", "4x8"), ("h200:2x8", "2x8"), ("b200:2x8", "2x8"), ("v5p:4x4x2", "4x8"), ("v6e:8x8", "8x8"),
    ),
    "hybrid_lm.MoE33B8E": (
        ("h100:1x8", "2x4"), ("h100:4x8", "8x4"), ("h200:1x8", "2x4"), ("b200:1x8", "2x4"),
        ("v5p:2x2x2", "2x4"), ("v6e:4x4", "4x4"),
    ),
}  # fmt: skip
_IMPORTED = tuple(f"{family}." for family in hugging_face.REGISTERED)
# Where the experts are, on one cluster: by default on one axis across nodes (M4), or on the first of two (hybrid).
_MESHES = {
    # Experts in four parts, one a node; their hidden dimension, heads and vocabulary inside of a node.
    "m4.MoE128E12L.h100-4x8.hidden_inside_nodes": ("mesh=4x8",),
    # Each node has all experts, and its GPUs the same tokens. More activations are stored than with a batch over all.
    "m4.MoE128E12L.h100-4x8.experts_inside_nodes": ("mesh=4x8", "layout=BG:x,EHNV:y", "model.remat=keep_outputs"),
    # One expert for each GPU of a node, and their hidden dimension across nodes.
    "hybrid_lm.MoE33B8E.h100-4x8.experts_inside_nodes": ("mesh=4x8", "layout=BGE:y,HNV:x,M~x/y"),
}


@dataclasses.dataclass(frozen=True)
class Request:
    """What to plan: a registered model, changed settings, the program, and where, if not on the model's own slice."""

    model: str
    changes: tuple[str, ...] = ()
    program: str = "train"
    topology: str = ""
    mesh: str = ""
    compiler_options: tuple[str, ...] = ()

    def command(self, name: str) -> list[str]:
        """Returns the command that writes the plan `name`."""
        sets = [f"--set={change}" for change in self.changes]
        where = [f"--{flag}={getattr(self, flag)}" for flag in ("topology", "mesh") if getattr(self, flag)]
        where += [f"--compiler_option={option}" for option in self.compiler_options]
        output = f"--json={DIRECTORY / name}.json"
        start = [sys.executable, "-m", "lingvo_moe", "plan", self.model]
        return [*start, *sets, *where, f"--program={self.program}", output]

    def is_of(self, plan: Plan) -> bool:
        """Whether `command` makes a plan of the same program for the same devices; of GPUs it has our options, too."""
        mesh = experiment.get(self.model, self.changes, DeviceMesh.parse(self.mesh) if self.mesh else None).mesh
        return (
            (plan.model, plan.changes, plan.program) == (self.model, self.changes, self.program)
            and (plan.topology, plan.mesh) == (self.topology or v3_slice(mesh.size), str(mesh))
            and set(self.compiler_options) <= set(plan.compiler_options)
        )


def variants() -> dict[str, Request]:
    """Returns what is planned besides the registered models: what papers leave open, decoding, and other layouts."""
    return {**_open_questions(), **_other_layouts()}


def _open_questions() -> dict[str, Request]:
    """Returns other readings of the papers, what they tried without figures, and decoding."""
    found = {}
    for row in _M4_ROWS:
        model = f"m4.{row}"
        # The other reading of "batch tokens": those of both sides together. Half of the activations fit another policy.
        remat = "keep_outputs" if row == "MoE128E36L" else "keep_hidden"
        half = experiment.get(model).input.batch_size // 2
        found[f"{model}.both_sides"] = Request(model, (f"input.batch_size={half}", f"model.remat={remat}"))
    # The tokens per core of 2048 cores: memory against the number of experts.
    for layers in (12, 36):
        remat = experiment.get(f"m4.MoE2048E{layers}L").model.remat
        model = f"m4.MoE128E{layers}L"
        found[f"{model}.tokens_per_core"] = Request(model, ("input.batch_size=2048", f"model.remat={remat}"))
    # The capacity of appendix A.6 (GShard's ICLR version), C = 2BL/(DE): with G = 2D twice that of section 2.2.
    for row in ("MoE128E12L", "MoE2048E36L"):
        found[f"m4.{row}.capacity_of_a6"] = Request(f"m4.{row}", ("model.capacity_factor=4",))
    # A TPU rounds float32 operands of products to bfloat16, and sends them so, by default.
    for row in ("MoE128E12L", "MoE2048E36L"):
        found[f"m4.{row}.highest"] = Request(f"m4.{row}", ("matmul_precision=highest",))
    for model in (*(f"m4.{row}" for row in _M4_ROWS), *_GENERATING):
        found[f"{model}.decode"] = Request(model, program="decode")
    # Their layouts shard dense weights, since complete updates do not fit in training; decoding would gather them in
    # each step.
    for model in _LARGEST:
        found[f"{model}.decode"] = Request(model, ("layout=gshard",), program="decode")
    for attempt in ("gspmd_attempt_1", "gspmd_attempt_2"):
        for mesh in ("8x16", "16x32", "32x64"):
            model = f"dense_lm.Dense64BMesh{mesh}"
            found[f"{model}.{attempt}"] = Request(model, (f"layout={attempt}",))
    return found


def _other_layouts() -> dict[str, Request]:
    """Returns layouts that the papers do not have."""
    found = {}
    # What `plan --search=layout` finds beyond the papers.
    model, changes = "dense_lm.Narrow16BMesh32x8", ("mesh=64x4", "layout=BG:x,NHV:y,M~x/y")
    found[f"{model}.found"] = Request(model, changes)
    found["hybrid_lm.MoE33B8E.found"] = Request("hybrid_lm.MoE33B8E", ("mesh=4x8", "layout=NHV:x,BGE:y,M~x/y"))
    changes = ("mesh=1024x2", "layout=BGE:x,NHV:y,M~x/y", "model.remat=keep_hidden")
    for model in ("m4.MoE2048E36L", "m4.MoE2048E60L"):
        found[f"{model}.found"] = Request(model, changes)
    # Every dense weight and its update sharded along M, which 512 cores divide; 2048 do not.
    found["m4.MoE512E12L.sharded_update"] = Request("m4.MoE512E12L", ("layout=BGE:x,M~x",))
    found["m4.MoE512E36L.sharded_update"] = Request("m4.MoE512E36L", ("layout=BGE:x,M~x", "model.remat=keep_hidden"))
    # On 128 cores: groups of 1024 tokens, as in all other rows, and the update of all weights sharded along H, V or M.
    groups = ("model.num_groups=1024",)
    found["m4.MoE128E12L.groups_of_1024"] = Request("m4.MoE128E12L", groups)
    for model in ("m4.MoE128E12L", "m4.MoE128E36L"):
        found[f"{model}.groups_of_1024.sharded_update"] = Request(model, (*groups, "layout=BGEHVM:x"))
    # Table 4's batch without a pipeline.
    model = "dense_lm.Pipelined16BMesh4x16x4"
    changes = ("mesh=256", "layout=BGHVM:x", "model.remat=keep_outputs")
    changes += ("model.pipeline=none", "model.stages=1", "model.microbatches=1")
    found[f"{model}.found"] = Request(model, changes)
    # Weights sharded along y alone need no AllGather in each step of decoding.
    model = "dense_lm.Dense64BMesh8x16"
    found[f"{model}.decode_on_1x128"] = Request(model, program="decode", mesh="1x128")
    # On GPUs: a group for each, and activations in bfloat16, as which a TPU multiplies and sends float32 by default.
    for model, topology, devices, capacity in (
        ("MoE128E12L", "h100:4x8", 32, 128),
        ("MoE2048E36L", "h100:32x8", 256, 16),
    ):
        changes = (f"model.inference_num_groups={devices}", f"model.inference_min_capacity={capacity}")
        found[f"m4.{model}.decode_on_{topology.replace(':', '-')}"] = Request(
            f"m4.{model}", (*changes, "model.activation_dtype=bfloat16"), "decode", topology, f"{devices}"
        )
    # Of imported weights: translation on one machine.
    bfloat16 = ("model.activation_dtype=bfloat16",)
    found["nllb.MoE54B.decode_on_h100-1x8"] = Request("nllb.MoE54B", bfloat16, "decode", "h100:1x8", "8")
    found["m4.MoE2048E60L.replicated"] = Request("m4.MoE2048E60L", ("layout=gshard",))
    return found


def clusters() -> dict[str, Request]:
    """Returns models on clusters of GPUs and slices of newer TPUs, by model, then as _CLUSTERS has them."""
    return {
        f"{model}.{topology.replace(':', '-')}": Request(model, topology=topology, mesh=mesh)
        for model, targets in _CLUSTERS.items()
        for topology, mesh in targets
    }


def meshes() -> dict[str, Request]:
    """Returns models on a cluster with other meshes and layouts than the registered ones."""
    return {
        name: Request(".".join(name.split(".")[:2]), changes, topology=name.split(".")[2].replace("-", ":"))
        for name, changes in _MESHES.items()
    }


def volumes() -> dict[str, Request]:
    """Returns the columns of GSPMD's table 8; a v3 slice has eight cores, so small ones have more data parallelism."""
    found = {}
    for name in (name for name in registry.names() if name.startswith("unet.Volume")):
        config = experiment.get(name)
        copies, (rows, columns) = max(1, 8 // config.mesh.size), config.mesh.shape
        changes = (f"input.batch_size={copies * config.input.batch_size}",) if copies > 1 else ()
        # libtpu's space-to-batch pass does not end within minutes on them.
        options = ("xla_tpu_run_space_to_batch=false",)
        found[name] = Request(name, changes, mesh=f"{copies * rows}x{columns}", compiler_options=options)
    return found


def large_models() -> list[str]:
    """Returns the registered models that are made for a slice; imported ones are trained already."""

    def is_large(config: experiment.Experiment) -> bool:
        return config.mesh.size >= _SMALLEST_SLICE or config.model.num_weights() >= _FEWEST_WEIGHTS

    own = [name for name in registry.names() if not name.startswith(_IMPORTED)]
    return [name for name in own if is_large(experiment.get(name))]


def plans() -> dict[str, Request]:
    """Returns all plans: every registered model for a slice, `variants`, `clusters`, `meshes` and `volumes`."""
    return {name: Request(name) for name in large_models()} | variants() | clusters() | meshes() | volumes()


def _exists(name: str, request: Request) -> bool:
    """Whether there is a plan of the request; a file that is none counts as missing."""
    try:
        return request.is_of(Plan.load(DIRECTORY / f"{name}.json"))
    except UserError:
        return False


def main(arguments: list[str]):
    """Makes the plans that are missing or of another request; after a failure the others are still made."""
    app.no_arguments(arguments[1:])
    known = plans()
    names = app.chosen_names("--only", _VALUES.only, list(known), lambda prefix, name: name.startswith(prefix))
    wanted = {name: known[name] for name in names}
    missing = {name: plan for name, plan in wanted.items() if _VALUES.force or not _exists(name, plan)}
    print(f"{counted(len(wanted), 'plan')}, {len(missing)} of them to make")
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    failed = []
    with app.terminated_as_interrupted(), progress.bar("planning", len(missing), "models") as advance:
        for name, request in missing.items():
            if subprocess.run(request.command(name), stdout=subprocess.DEVNULL).returncode:
                failed.append(name)
            advance(note=name)
    if failed:
        raise UserError(f"no plan could be made of {', '.join(failed)}; see the errors above.")


if __name__ == "__main__":
    app.run(main, _VALUES)
