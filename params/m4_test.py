"""The registered M4 family is the paper's: weights, layers and cores of GShard table 1."""

from __future__ import annotations

import pytest

from lingvo_moe import experiment, tree
from lingvo_moe.layers.routers.base import expert_capacity

# Published figures have one or two digits, and some count in binary billions (619.4e9 weights are 577 x 2^30, GSPMD
# table 6).
_ROUNDING = 0.075

TABLE_1 = {  # GShard table 1 and section 4.2: weights, experts per layer, experts in total, layers, cores
    "m4.MoE2048E36L": (600e9, 2048, 36_864, 36, 2048),
    "m4.MoE2048E12L": (200e9, 2048, 12_288, 12, 2048),
    "m4.MoE512E36L": (150e9, 512, 9_216, 36, 512),
    "m4.MoE512E12L": (50e9, 512, 3_072, 12, 512),
    "m4.MoE128E36L": (37e9, 128, 2_304, 36, 128),
    "m4.MoE128E12L": (12.5e9, 128, 768, 12, 128),
    "m4.MoE2048E60L": (1e12, 2048, 61_440, 60, 2048),
    "m4.Dense96L": (2.3e9, 0, 0, 96, 2048),
    "m4.TransformerBig": (0.4e9, 0, 0, 12, 8),
}


@pytest.mark.parametrize("name", sorted(TABLE_1))
def test_weights_experts_layers_and_cores_are_table_1s(name):
    """A wrong dimension anywhere in a model changes its number of weights."""
    weights, experts, total, layers, cores = TABLE_1[name]
    config = experiment.get(name)
    assert config.model.num_weights() == pytest.approx(weights, rel=_ROUNDING)
    assert (config.model.num_experts, config.model.num_layers, config.mesh.size) == (experts, layers, cores)
    expert_size = 2 * config.model.model_dim * config.model.hidden_dim
    moe_layers = layers // 2
    assert experts * moe_layers == total
    declared = sum(w.size for path, w in tree.flatten(config.model.weights()).items() if "E" in w.logical_axes)
    assert declared == total * expert_size


@pytest.mark.parametrize(("name", "capacity"), [("m4.MoE2048E36L", 1), ("m4.MoE512E12L", 2), ("m4.MoE128E36L", 32)])
def test_groups_and_capacity_are_the_papers(name, capacity):
    """G = 2 D groups of N/G tokens of a side; the capacity per group is C = 2N/(G E), at least 1 (section 2.2)."""
    config = experiment.get(name)
    tokens = config.input.batch_size * config.input.source_length
    assert config.model.num_groups == 2 * config.mesh.size
    tokens_per_group = tokens // config.model.num_groups
    assert expert_capacity(tokens_per_group, config.model.num_experts, config.model.capacity_factor) == capacity
