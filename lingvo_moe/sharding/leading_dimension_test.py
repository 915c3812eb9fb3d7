"""Each device computes with its own part of a leading dimension, and parts move to neighbours alone."""

from __future__ import annotations

import numpy as np
import pytest

from lingvo_moe.lazy import tf
from lingvo_moe.sharding import leading_dimension
from lingvo_moe.sharding.layout import AxisRule, DeviceMesh, Layout
from lingvo_moe.testing import harness

STAGES = 8


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_each_device_reads_rows_of_its_own(devices):
    """A lookup in a sharded dimension, of which the partitioner would gather the table."""
    layout = Layout(DeviceMesh((devices,)), (AxisRule("P", ("x",)),))
    random = np.random.default_rng(0)
    inputs = {
        "table": random.normal(size=(STAGES, 5, 3)).astype(np.float32),
        "rows": np.int32([4, 0, 2, 2, 1, 3, 0, 4]),
    }

    def look_up(table: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
        return tf.gather(table, rows, axis=1, batch_dims=1)

    def function(inputs: dict) -> dict:
        arguments = [(inputs["table"], "Prm"), (inputs["rows"], "P")]
        return {"y": leading_dimension.map_shards(look_up, arguments, "Pm", layout)}

    executable = harness.compile_for(function, inputs, layout, {"table": "Prm", "rows": "P", "y": "Pm"})
    assert harness.collectives(executable) == {}
    expected = inputs["table"][np.arange(STAGES), inputs["rows"]]
    np.testing.assert_array_equal(executable(inputs)["y"], expected)


@pytest.mark.parametrize("function, shift", [(leading_dimension.pass_on, 1), (leading_dimension.pass_back, -1)])
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_parts_move_by_one_collective_permute(function, shift, devices):
    """Any other form of the same shift is an AllGather or two."""
    layout = Layout(DeviceMesh((devices,)), (AxisRule("P", ("x",)),))
    inputs = {"x": np.arange(STAGES * 3, dtype=np.float32).reshape(STAGES, 3)}
    executable = harness.compile_for(
        lambda inputs: {"y": layout.annotate(function(inputs["x"]), "Pm")}, inputs, layout, {"x": "Pm", "y": "Pm"}
    )
    assert harness.collectives(executable) == {"collective-permute": 1}
    np.testing.assert_array_equal(executable(inputs)["y"], np.roll(inputs["x"], shift, axis=0))
