"""Updates of slices in place."""

from __future__ import annotations

import numpy as np

from lingvo_moe.lazy import tf
from lingvo_moe.ops.slices import dynamic_update_slice
from lingvo_moe.testing import harness


def test_dynamic_update_slice():
    """A slice at an index that is known only at run time is replaced, and nothing else."""

    def function(inputs: dict) -> dict:
        return {"y": dynamic_update_slice(inputs["x"], tf.fill((1, 2), 9.0), [inputs["row"], 1])}

    found = harness.run(function, {"x": np.zeros((3, 4), np.float32), "row": np.int32(2)})["y"]
    np.testing.assert_array_equal(found, [[0, 0, 0, 0], [0, 0, 0, 0], [0, 9, 9, 0]])
