"""The U-Nets are those of GSPMD's table 8."""

from __future__ import annotations

import pytest

from lingvo_moe import experiment, tree
from lingvo_moe.data.volumes import VolumeInput
from lingvo_moe.errors import UserError
from lingvo_moe.sharding.layout import DeviceMesh

# As printed: device mesh, side of the image, batch.
TABLE_8 = {
    "Volume128Mesh1x1": ((1, 1), 128, 4),
    "Volume128Mesh1x2": ((1, 2), 128, 4),
    "Volume128Mesh1x4": ((1, 4), 128, 4),
    "Volume128Mesh1x8": ((1, 8), 128, 4),
    "Volume128Mesh1x16": ((1, 16), 128, 4),
    "Volume256Mesh4x16": ((4, 16), 256, 8),
    "Volume256Mesh2x32": ((2, 32), 256, 8),
}


@pytest.mark.parametrize("name", TABLE_8)
def test_column_equals_table_8(name):
    """The first mesh axis has data parallelism, the second the first spatial dimension; weights are replicated."""
    config = experiment.get(f"unet.{name}")
    assert isinstance(config.input, VolumeInput)
    mesh, side, batch = TABLE_8[name]
    assert (config.mesh.shape, config.input.size, config.input.batch_size) == (mesh, (side,) * 3, batch)
    layout = config.steps.layout
    assert layout.mesh_axes(config.batch_specs()["source"]["voxels"].logical_axes) == ("x", "y", None, None, None)
    weights = tree.flatten(config.model.weights()).values()
    assert all(set(layout.mesh_axes(weight.logical_axes)) == {None} for weight in weights)


def test_more_devices_than_slices_at_the_deepest_level_are_an_error():
    """256 voxels, halved three times, are 32: enough for the 32 devices of the last column, and for no more."""
    with pytest.raises(UserError, match="256 voxels along X, 32 at the last of 4 levels; the 64 devices along X"):
        experiment.get("unet.Volume256Mesh2x32", mesh=DeviceMesh((1, 64)))
