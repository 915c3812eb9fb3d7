"""The Conformers are those of GSPMD's table 5."""

from __future__ import annotations

import pytest

from lingvo_moe import experiment

# As printed: weights, layers, stages, schedule, microbatches; one row each. M, H and N are those of section 5.3.
TABLE_5 = {
    "Conformer6B": ("6.47B", 32, 8, "gpipe", 64),
    "Conformer6BSmall": ("6.47B", 32, 8, "gpipe", 16),
    "Conformer6BCircular": ("6.47B", 32, 8, "circular", 16),
    "Conformer13B": ("12.95B", 64, 16, "gpipe", 128),
    "Conformer13BSmall": ("12.95B", 64, 16, "gpipe", 32),
    "Conformer13BCircular": ("12.95B", 64, 16, "circular", 32),
}


@pytest.mark.parametrize("name", TABLE_5)
def test_column_equals_table_5(name):
    """Weights are counted in binary billions."""
    config = experiment.get(f"conformer.{name}")
    model = config.model
    weights = f"{model.num_weights() / 2**30:.2f}B"
    assert (weights, model.num_layers, model.stages, model.pipeline, model.microbatches) == TABLE_5[name]
    assert (model.model_dim, model.hidden_dim, model.num_heads) == (3072, 12_288, 16)
    assert config.input.batch_size == model.microbatches


def test_layers_around_the_backbone_are_data_parallel_on_its_devices():
    """GSPMD section 5.3: the batch before and after the pipeline, stages inside of it, on the same axis."""
    layout = experiment.get("conformer.Conformer6B").steps.layout
    assert layout.mesh_axes("BTM") == ("x", None, None) and layout.mesh_axes("RMH") == ("x", None, None)
    inside = layout.within_stages()
    assert inside.mesh_axes("BTM") == (None, None, None)
    assert inside.vectorized("P").mesh_axes("BTM") == (None, None, None) and inside.mesh_axes("PBTM")[0] == "x"
