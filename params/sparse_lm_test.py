"""The sparse language models are those of GSPMD table 6 and figure 8a."""

from __future__ import annotations

import pytest

from lingvo_moe import experiment, tree

# As printed: weights in binary billions, experts per layer, mesh, batch in sequences.
TABLE_6 = {
    "MoE10B32E": ("10B", 32, "32", 128),
    "MoE37B128E": ("37B", 128, "128", 512),
    "MoE145B512E": ("145B", 512, "512", 2048),
    "MoE577B2048E": ("577B", 2048, "2048", 8192),
}


@pytest.mark.parametrize("name", TABLE_6)
def test_column_equals_table_6(name):
    """The table does not give the layers; 36 layers with M4's dimensions give all four numbers of weights."""
    config = experiment.get(f"sparse_lm.{name}")
    model = config.model
    weights = f"{model.num_weights() / 2**30:.0f}B"
    assert (weights, model.num_experts, str(config.mesh), config.input.batch_size) == TABLE_6[name]
    sizes = (model.num_layers, model.model_dim, model.hidden_dim, model.num_heads, model.head_dim)
    assert sizes == (36, 1024, 8192, 16, 128)


@pytest.mark.parametrize("name", TABLE_6)
def test_each_device_has_one_expert_and_all_other_weights(name):
    """GSPMD section 5.4: model parallelism in the MoE layers, data parallelism in all others."""
    config = experiment.get(f"sparse_lm.{name}")
    layout = config.steps.layout
    for path, weight in tree.flatten(config.model.weights()).items():
        shards = [layout.num_shards(weight.logical_axes, axis) for axis in weight.logical_axes]
        assert shards == [config.model.num_experts if axis == "E" else 1 for axis in weight.logical_axes], path
