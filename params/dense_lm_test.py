"""The dense language models are the papers': GSPMD tables 2 and 3, and table 3 of GShard (ICLR 2021)."""

from __future__ import annotations

import pytest

from lingvo_moe import experiment, tree

# As printed: weights, layers, M, H, N, D, mesh, batch in sequences.
ROWS = {
    "Dense64BMesh8x16": ("64B", 32, 8192, 65_536, 128, 256, "8x16", 64),  # GSPMD table 2
    "Dense64BMesh16x32": ("64B", 32, 8192, 65_536, 128, 256, "16x32", 256),
    "Dense64BMesh32x64": ("64B", 32, 8192, 65_536, 128, 256, "32x64", 1024),
    "Dense128B": ("128B", 64, 8192, 65_536, 128, 256, "32x64", 512),
    "Dense256B": ("256B", 128, 8192, 65_536, 128, 256, "32x64", 256),
    "Dense512B": ("512B", 256, 8192, 65_536, 128, 256, "32x64", 128),
    "Dense1T": ("1T", 128, 16_384, 131_072, 256, 256, "32x64", 128),
    "Dense64B": ("64B", 32, 8192, 65_536, 128, 256, "32x64", 512),  # GShard (ICLR) table 3, with 128B and 1T above
    "Dense4T": ("4T", 128, 32_768, 262_144, 512, 256, "32x64", 32),
    "Narrow16BMesh4x16": ("16B", 64, 4096, 16_384, 64, 128, "4x16", 48),  # GSPMD table 3
    "Narrow16BMesh8x16": ("16B", 64, 4096, 16_384, 64, 128, "8x16", 96),
    "Narrow16BMesh8x32": ("16B", 64, 4096, 16_384, 64, 128, "8x32", 192),
    "Narrow16BMesh16x4": ("16B", 64, 4096, 16_384, 64, 128, "16x4", 48),
    "Narrow16BMesh16x8": ("16B", 64, 4096, 16_384, 64, 128, "16x8", 96),
    "Narrow16BMesh32x8": ("16B", 64, 4096, 16_384, 64, 128, "32x8", 192),
}

# GSPMD table 4: mesh (L, X, Y), stages, microbatches x sequences.
TABLE_4 = {
    "Pipelined16BMesh2x16x8": ("2x16x8", 2, 16, 64),
    "Pipelined16BMesh4x16x4": ("4x16x4", 4, 16, 64),
    "Pipelined16BMesh4x16x4Small": ("4x16x4", 4, 32, 32),
    "Pipelined16BMesh8x16x2": ("8x16x2", 8, 32, 32),
    "Pipelined16BMesh8x8x4": ("8x8x4", 8, 32, 32),
}


@pytest.mark.parametrize("name", TABLE_4)
def test_pipelined_row_equals_table_4(name):
    """The model is that of table 3, and so are its weights."""
    config, narrow = experiment.get(f"dense_lm.{name}"), experiment.get("dense_lm.Narrow16BMesh4x16")
    model = config.model
    row = (str(config.mesh), model.stages, model.microbatches, config.input.batch_size // model.microbatches)
    assert row == TABLE_4[name] and model.pipeline == "gpipe"
    assert (model.num_layers, model.num_weights()) == (narrow.model.num_layers, narrow.model.num_weights())


def printed(weights: int) -> str:
    """Returns a number of weights as the papers print it, in binary billions or trillions."""
    return f"{weights / 2**40:.0f}T" if weights >= 2**40 else f"{weights / 2**30:.0f}B"


@pytest.mark.parametrize("name", ROWS)
def test_row_equals_the_papers(name):
    """Embeddings are included; they change none of the printed digits."""
    config = experiment.get(f"dense_lm.{name}")
    model = config.model
    row = (
        printed(model.num_weights()),
        model.num_layers,
        model.model_dim,
        model.hidden_dim,
        model.num_heads,
        model.head_dim,
        str(config.mesh),
        config.input.batch_size,
    )
    assert row == ROWS[name] and model.num_experts == 0


def test_wide_layer_has_2b_weights():
    """GSPMD section 5.1: attention and feed-forward layer together."""
    weights = tree.flatten(experiment.get("dense_lm.Dense64B").model.weights())
    stacked = sum(weight.size for path, weight in weights.items() if path.startswith("decoder/"))
    assert printed(stacked // 32) == "2B"


@pytest.mark.parametrize("layout", ["auto", "gspmd", "gspmd_attempt_1", "gspmd_attempt_2"])
def test_sharding_of_weights_is_gspmd_table_1(layout):
    """The same in all three attempts; R is the axis of repeated layers, which the table does not have."""
    config = experiment.get("dense_lm.Dense64B", [f"layout={layout}"])
    axes = {
        weight.logical_axes: ",".join(axis or "_" for axis in config.steps.layout.mesh_axes(weight.logical_axes))
        for weight in tree.flatten(config.model.weights()).values()
    }
    table_1 = {"RMND": "_,x,y,_", "RNDM": "_,y,_,x", "RMH": "_,x,y", "RHM": "_,y,x", "VM": "y,x", "MV": "x,y"}
    assert {logical_axes: axes[logical_axes] for logical_axes in table_1} == table_1 and set(axes) - set(table_1) == {
        "M",
        "RM",
    }
