"""The hybrid language models are those of GSPMD table 7 and figure 8b."""

from __future__ import annotations

import pytest

from lingvo_moe import experiment, tree

# As printed: weights in binary billions, experts per layer, H, N, mesh, batch in sequences.
TABLE_7 = {
    "MoE33B8E": ("33B", 8, 32_768, 128, "8x4", 32),
    "MoE57B16E": ("57B", 16, 32_768, 128, "16x8", 128),
    "MoE420B32E": ("420B", 32, 131_072, 512, "32x16", 128),
    "MoE804B64E": ("804B", 64, 131_072, 512, "64x32", 512),
}


@pytest.mark.parametrize("name", TABLE_7)
def test_column_equals_table_7(name):
    """The table does not give layers, M and D; 12, 8192 and 128 give all four numbers of weights."""
    config = experiment.get(f"hybrid_lm.{name}")
    model = config.model
    weights = f"{model.num_weights() / 2**30:.0f}B"
    assert (
        weights,
        model.num_experts,
        model.hidden_dim,
        model.num_heads,
        str(config.mesh),
        config.input.batch_size,
    ) == TABLE_7[name]
    assert (model.num_layers, model.model_dim, model.head_dim) == (12, 8192, 128)


@pytest.mark.parametrize("name", TABLE_7)
def test_sharding_of_weights_is_figure_8b(name):
    """One expert of each layer along x, its hidden dimension along y; dense layers as in GSPMD table 1."""
    config = experiment.get(f"hybrid_lm.{name}")
    axes = {
        weight.logical_axes: ",".join(axis or "_" for axis in config.steps.layout.mesh_axes(weight.logical_axes))
        for weight in tree.flatten(config.model.weights()).values()
    }
    figure_8b = {
        "REMH": "_,x,_,y",
        "REHM": "_,x,y,_",
        "RMH": "_,x,y",
        "RHM": "_,y,x",
        "RMND": "_,x,y,_",
        "RNDM": "_,y,_,x",
        "Rme": "_,_,_",
    }
    assert {logical_axes: axes[logical_axes] for logical_axes in figure_8b} == figure_8b
    assert config.mesh.shape[0] == config.model.num_experts
