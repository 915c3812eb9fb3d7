"""Protects the HLO parser: instructions are counted as often as they run, collectives have their sizes and groups."""

from __future__ import annotations

import numpy as np
import pytest

from lingvo_moe.analysis.hlo import Collective, Module
from lingvo_moe.lazy import tf
from lingvo_moe.sharding.layout import DeviceMesh, Layout
from lingvo_moe.testing import harness

_TEXT = """HloModule small, is_scheduled=true

%fused (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %inner = f32[4]{0:T(256)} negate(%p), backend_config={"estimated_cycles":"1000000"}
}

%condition (c: (s32[], f32[4])) -> pred[] {
  %c = (s32[]{:T(256)}, f32[4]{0:T(256)}) parameter(0)
  %last = s32[]{:T(256)} constant(8)
  %minus = s32[]{:T(256)} constant(-1)
  %zero = s32[]{:T(256)} constant(0)
  %limit = s32[]{:T(256)} constant(100)
  %i = s32[]{:T(256)} get-tuple-element(%c), index=0
  %product = s32[]{:T(256)S(6)} multiply(%i, %minus)
  %backwards = s32[]{:T(256)S(6)} add(%product, %last)
  %more = pred[]{:T(1024)} compare(%backwards, %zero), direction=GE
  %below = pred[]{:T(1024)} compare(%i, %limit), direction=LT
  ROOT %both = pred[]{:T(1024)} and(%below, %more)
}

%until_done (d: (s32[], pred[])) -> pred[] {
  %d = (s32[]{:T(256)}, pred[]) parameter(0)
  ROOT %flag = pred[] get-tuple-element(%d), index=1
}

%like_before (e: (s32[], f32[4], s32[])) -> pred[] {
  %e = (s32[]{:T(256)}, f32[4]{0:T(256)}, s32[]{:T(256)}) parameter(0)
  %at = s32[]{:T(256)} get-tuple-element(%e), index=0
  %end = s32[]{:T(256)} get-tuple-element(%e), index=2
  ROOT %less = pred[] compare(%at, %end), direction=LT
}

%gradient (g: (s32[], f32[4], s32[])) -> (s32[], f32[4], s32[]) {
  %g = (s32[]{:T(256)}, f32[4]{0:T(256)}, s32[]{:T(256)}) parameter(0)
  %kept = s32[]{:T(256)} get-tuple-element(%g), index=2
  %y = f32[4]{0:T(256)} copy(%g), backend_config={"estimated_cycles":"100"}
  ROOT %u = (s32[]{:T(256)}, f32[4]{0:T(256)}, s32[]{:T(256)}) tuple(%kept, %y, %kept)
}

%body (b: (s32[], f32[4])) -> (s32[], f32[4]) {
  %b = (s32[]{:T(256)}, f32[4]{0:T(256)}) parameter(0)
  %x = f32[4]{0:T(256)} get-tuple-element(%b), index=1
  %dispatched = bf16[2,128,64]{2,1,0:T(8,128)(2,1)} all-to-all(%x), \
replica_groups=mesh['axis_0'=8,'axis_1'=4] {'axis_0'}, \
dimensions={1}, metadata={op_name="jit(call)/while/einsum/Einsum"}
  %f = f32[4]{0:T(256)} fusion(%x), kind=kLoop, calls=%fused, backend_config={"estimated_cycles":"10"}
  ROOT %t = (s32[]{:T(256)}, f32[4]{0:T(256)}) tuple(%x, %f)
}

ENTRY %main (a: f32[4]) -> f32[4] {
  %a = f32[4]{0:T(256)} parameter(0)
  %start = (s32[]{:T(256)}, /*index=1*/f32[4]{0:T(256)}) tuple(%a, %a)
  %while.1 = (s32[]{:T(256)}, f32[4]{0:T(256)}) while(%start), condition=%condition, body=%body
  %turns = s32[]{:T(256)} get-tuple-element(%while.1), index=0
  %turned = s32[]{:T(256)} copy(%turns)
  %begin = (s32[]{:T(256)}, f32[4]{0:T(256)}, s32[]{:T(256)}) tuple(%a, %a, %turned)
  %while.3 = (s32[]{:T(256)}, f32[4]{0:T(256)}, s32[]{:T(256)}) while(%begin), condition=%like_before, body=%gradient
  %while.2 = (s32[]{:T(256)}, f32[4]{0:T(256)}) while(%start), condition=%until_done, body=%body
  %sum = (f32[]{:T(256)}, f32[8]{0:T(256)}) all-reduce(%a, %a), replica_groups=[4,8]<=[8,4]T(1,0), to_apply=%add
  %gathered = f32[32]{0:T(256)} all-gather(%a), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
  ROOT %r = f32[4]{0:T(256)} copy(%a), backend_config={"flag":[],"estimated_cycles":"7"}
}
"""


def test_instructions_in_loops_count_with_the_trip_count():
    """Also in loops that count down or run as often as another one; if data decides, once, in `unknown_loops`.

    The instructions inside a fusion are in the fusion's own estimate.
    """
    module = Module(_TEXT, 32)
    assert module.cycles() == 9 * 10 + 9 * 100 + 1 * 10 + 7
    assert module.unknown_loops == 1


def test_collectives_have_their_bytes_groups_and_strides():
    """In the three notations of groups of XLA; every element of a tuple counts."""
    all_to_all = Collective("all-to-all", 2 * 128 * 64 * 2, 8, 4, 9, "jit(call)/while/einsum/Einsum")
    collectives = Module(_TEXT, 32).collectives()
    assert collectives[0] == all_to_all
    assert collectives[2:] == [
        Collective("all-reduce", 4 + 32, 8, 4, 1, ""),
        Collective("all-gather", 128, 4, 1, 1, ""),
    ]


def test_text_that_is_not_a_module_is_an_error():
    """Not an empty module."""
    with pytest.raises(ValueError, match="expected the text of a compiled XLA module"):
        Module("nothing here", 1)


@pytest.mark.parametrize("mesh, group, stride", [("8", 8, 1), ("4x2", 4, 2)])
def test_collectives_of_a_compiled_loop_count_with_its_trips(mesh, group, stride):
    """The partitioner's own text: a sum over the sharded dimension, five times, over the first mesh axis."""
    layout = Layout.of(DeviceMesh.parse(mesh))

    def function(inputs):
        def turn(i, x):
            total = layout.annotate(tf.reduce_sum(x, axis=0), "s")
            return i + 1, layout.annotate(x + tf.sin(total), "Bs")

        _, x = tf.while_loop(lambda i, _: i < 5, turn, (tf.constant(0), inputs["x"]), maximum_iterations=5)
        return {"y": x}

    inputs = {"x": np.ones((8, 16), np.float32)}
    text = harness.compile_for(function, inputs, layout, {"x": "Bs", "y": "Bs"}).hlo()
    collectives = Module(text, 8).collectives()
    assert {(c.kind, c.bytes, c.group_size, c.stride) for c in collectives} == {("all-reduce", 16 * 4, group, stride)}
    assert sum(c.times for c in collectives) == 5
