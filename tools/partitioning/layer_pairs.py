"""Compiles the forward pass of an MoE layer and of the Transformer layer beside it, alone, as GShard figure 8 times it.

    python -m tools.partitioning.layer_pairs [--output=docs/layer_pairs.json]

The two layers are those of M4's encoder, in training, for 128, 512 and 2048 TPU v3 cores with equal tokens per core;
they take some 15 seconds of one core each. tools.report shows them.
"""

from __future__ import annotations

import pathlib
from collections import defaultdict
from collections.abc import Sequence

from absl import flags

from lingvo_moe import experiment, tree
from lingvo_moe.analysis import plan, roofline
from lingvo_moe.analysis.hardware import GENERATIONS
from lingvo_moe.analysis.hlo import Module
from lingvo_moe.cli import app
from lingvo_moe.engines.topology import Slice, v3_slice
from lingvo_moe.experiment import Experiment
from lingvo_moe.layers.base import Context
from lingvo_moe.models.translation import Translation
from lingvo_moe.program import Program, lower
from lingvo_moe.sharding.layout import Layout, Spec
from lingvo_moe.steps import weight_specs
from lingvo_moe.utils import output_files
from tools.report import layers
from tools.report.layers import LayerPair

_VALUES = flags.FlagValues()
flags.DEFINE_string("output", "docs/layer_pairs.json", "the file of results", flag_values=_VALUES)
# Row of GShard table 1, and its batch with 2048 source tokens per core.
PAIRS = {
    "m4.MoE128E12L": ("input.batch_size=2048",),
    "m4.MoE512E12L": ("input.batch_size=8192",),
    "m4.MoE2048E12L": ("input.batch_size=32768",),
}
_ONE_OF_EACH = ("model.num_encoder_layers=0", "model.unroll=true", "model.remat=none")
_V3 = GENERATIONS["v3"]
_EMBEDDING = "embedding"


def pair_of(model: str, changes: Sequence[str]) -> Experiment:
    """Returns the experiment with one dense and one MoE layer in the encoder, which are not in a loop."""
    registered = experiment.get(model).model
    assert isinstance(registered, Translation)
    return experiment.get(model, [*changes, f"model.num_layers={registered.layers_per_repeat}", *_ONE_OF_EACH])


def forward(config: Experiment) -> Program:
    """Returns the program `{theta, source, seed} -> {outputs}`, the encoder's forward pass in training."""
    model, layout = config.model, Layout.of(config.mesh, config.layout)
    assert isinstance(model, Translation)
    weights = {name: model.weights()[name] for name in ("source_embedding", "encoder")}
    source = config.batch_specs()["source"]

    def annotated(declared: dict, tensors: dict) -> dict:
        return tree.map_leaves(lambda leaf, tensor: layout.annotate(tensor, leaf.logical_axes), declared, tensors)

    def function(inputs: dict) -> dict:
        context = Context(layout, platform=config.platform, seed=inputs["seed"])
        theta = annotated(weights, inputs["theta"])
        outputs, _ = model.encode(theta, annotated(source, inputs["source"]), context)
        return {"outputs": outputs}

    inputs = {"theta": weight_specs(weights), "source": source, "seed": Spec((2,), "int32", "s")}
    return lower("layer_pair", function, inputs, {"outputs": "BTM"}, layout)


def compiled(model: str, changes: Sequence[str]) -> LayerPair:
    """Compiles a pair of layers and returns its times."""
    config = pair_of(model, changes)
    target = Slice.of(v3_slice(config.mesh.size))
    return read(model, config, target, target.compile(forward(config)).hlo())


def read(model: str, config: Experiment, target: Slice, hlo: str) -> LayerPair:
    """Returns the times of a compiled pair, without its embedding and without kernels that have no estimate."""
    assert _V3.clock, "TPU v3 has a published clock"
    module = Module(hlo, config.mesh.size)
    compute: dict[str, float] = defaultdict(float)
    bound: dict[str, float] = defaultdict(float)
    for instruction, times in module.runs():
        part = plan.part_of(instruction)
        if instruction.cycles and part != _EMBEDDING:
            compute[part] += times * instruction.cycles / _V3.clock
            bound[part] += times * roofline.seconds(module, instruction, _V3)
    return LayerPair(
        model=model,
        experts=config.model.num_experts,
        cores=config.mesh.size,
        tokens=config.input.batch_size * config.input.lengths["source"],
        compute=dict(compute),
        roofline=dict(bound),
        collectives={cost.kind: cost.seconds for cost in plan.collective_costs(module, target)},
    )


def main(arguments: list[str]):
    """Writes the file."""
    app.no_arguments(arguments[1:])
    output_files.check_path("--output", _VALUES.output)
    layers.save([compiled(model, changes) for model, changes in PAIRS.items()], pathlib.Path(_VALUES.output))


if __name__ == "__main__":
    app.run(main, _VALUES)
