"""The compiler's schedule: a loop counts as often as it runs, and of every GPU it has times, not constants."""

from __future__ import annotations

import numpy as np
import pytest

from lingvo_moe.analysis import compiler_schedule
from lingvo_moe.analysis.hlo import Module
from lingvo_moe.engines.cluster import Cluster
from lingvo_moe.lazy import tf
from lingvo_moe.sharding.layout import DeviceMesh, Layout
from lingvo_moe.testing import harness

_MODULE = """HloModule jit_step, is_scheduled=true

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]) parameter(0)
  ROOT %next = (s32[], f32[8]) fusion(%p), kind=kLoop, calls=%fused
}

%condition (q: (s32[], f32[8])) -> pred[] {
  ROOT %q = pred[] parameter(0)
}

ENTRY %main (a: (s32[], f32[8])) -> (s32[], f32[8]) {
  %a = (s32[], f32[8]) parameter(0)
  ROOT %w = (s32[], f32[8]) while(%a), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"18"}}
}
"""
_DESCRIBED = """hlo_module {
  name: "jit_step"
  entry_computation_name: "main"
  computations {
    name: "body"
    instructions {
      name: "next"
      id: 7
    }
    root_id: 1
    id: 2
  }
  computations {
    name: "main"
    instructions {
      name: "w"
      id: 9
    }
    id: 5
  }
}
"""


def _scheduled(identity: int, cycles: float) -> str:
    return f"""computation_schedules {{
  computation_id: {identity}
  instructions {{
    id: 7
    end_timestamp_cycles: 3
  }}
  scheduler_statistics {{
    total_wasted_cycles: 1.5
    total_cycles: {cycles}
  }}
  cycles_per_microsecond: 2
}}
"""


def test_a_loop_counts_as_often_as_it_runs():
    """18 trips of 40 cycles and 60 cycles outside of the loop, two a microsecond."""
    text = _DESCRIBED + _scheduled(2, 40) + _scheduled(5, 60.0)
    assert compiler_schedule.seconds(text, Module(_MODULE, 8)) == pytest.approx((18 * 20 + 30) * 1e-6)


@pytest.mark.parametrize(
    "text, message",
    [
        (_DESCRIBED + _scheduled(3, 40), "not that of the module"),
        (_DESCRIBED.replace('"main"', '"other"') + _scheduled(5, 40), "not that of the module"),
        (_DESCRIBED, "no times"),
        ("", "no times"),
    ],
)
def test_another_schedule_is_refused(text, message):
    """A time of zero would look like a fast step."""
    with pytest.raises(ValueError, match=message):
        compiler_schedule.seconds(text, Module(_MODULE, 8))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["b200:1x8", "b200:2x8"])
def test_the_compiler_knows_a_b200(name):
    """It takes less time than as many H100. The compiler's constants for an unknown GPU make an AllReduce 5 ms."""
    assert 0 < _scheduled_seconds(name) < _scheduled_seconds(name.replace("b200", "h100")) < 2e-3


def _scheduled_seconds(name: str) -> float:
    """The schedule of a sum of products of sharded matrices, 4 MiB each, over all devices of a cluster."""
    cluster = Cluster.of(name)
    devices = len(cluster.devices)
    program = harness.lower_for(
        lambda inputs: {"y": tf.reduce_sum(tf.matmul(inputs["x"], inputs["x"]), axis=0)},
        {"x": np.broadcast_to(np.float32(0), (64, 1024, 1024))},
        Layout.of(DeviceMesh((devices,))),
        {"x": "Bmh", "y": "mh"},
    )
    compiled = cluster.compile(program)
    assert compiled.schedule is not None
    return compiler_schedule.seconds(compiled.schedule, Module(compiled.hlo(), devices))
