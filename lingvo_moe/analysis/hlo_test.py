"""Protects the HLO parser: instructions are counted as often as they run."""

from __future__ import annotations

import pytest

from lingvo_moe.analysis.hlo import Module

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
  %k_before = s32[]{:T(256)} get-tuple-element(%g), index=0
  %k_one = s32[]{:T(256)} constant(1)
  %k_next = s32[]{:T(256)} add(%k_before, %k_one)
  ROOT %u = (s32[]{:T(256)}, f32[4]{0:T(256)}, s32[]{:T(256)}) tuple(%k_next, %y, %kept)
}

%body (b: (s32[], f32[4])) -> (s32[], f32[4]) {
  %b = (s32[]{:T(256)}, f32[4]{0:T(256)}) parameter(0)
  %x = f32[4]{0:T(256)} get-tuple-element(%b), index=1
  %f = f32[4]{0:T(256)} fusion(%x), kind=kLoop, calls=%fused, backend_config={"estimated_cycles":"10"}
  %i_before = s32[]{:T(256)} get-tuple-element(%b), index=0
  %i_one = s32[]{:T(256)} constant(1)
  %i_next = s32[]{:T(256)} add(%i_before, %i_one)
  ROOT %t = (s32[]{:T(256)}, f32[4]{0:T(256)}) tuple(%i_next, %f)
}

%slices_left (h: (s32[], f32[4], u32[])) -> pred[] {
  %h = (s32[]{:T(256)}, f32[4]{0:T(256)}, u32[]{:T(256)}) parameter(0)
  %slices = u32[]{:T(256)} constant(9)
  %slice = u32[]{:T(256)} get-tuple-element(%h), index=2
  ROOT %left = pred[] compare(%slice, %slices), direction=LT
}

%two_slices (k: (s32[], f32[4], u32[])) -> (s32[], f32[4], u32[]) {
  %k = (s32[]{:T(256)}, f32[4]{0:T(256)}, u32[]{:T(256)}) parameter(0)
  %device = s32[]{:T(256)} get-tuple-element(%k), index=0
  %done = u32[]{:T(256)} get-tuple-element(%k), index=2
  %before = u32[]{:T(256)S(6)} copy(%done)
  %two = u32[]{:T(256)} constant(2)
  %after = u32[]{:T(256)} add(%before, %two), control-predecessors={%before}
  %z = f32[4]{0:T(256)} copy(%k), backend_config={"estimated_cycles":"1000"}
  ROOT %v = (s32[]{:T(256)}, f32[4]{0:T(256)}, u32[]{:T(256)}) tuple(%device, %z, %after)
}

ENTRY %main (a: f32[4]) -> f32[4] {
  %a = f32[4]{0:T(256)} parameter(0)
  %from = s32[]{:T(256)} constant(0)
  %start = (s32[]{:T(256)}, /*index=1*/f32[4]{0:T(256)}) tuple(%from, %a)
  %while.1 = (s32[]{:T(256)}, f32[4]{0:T(256)}) while(%start), condition=%condition, body=%body
  %turns = s32[]{:T(256)} get-tuple-element(%while.1), index=0
  %turned = s32[]{:T(256)} copy(%turns)
  %begin = (s32[]{:T(256)}, f32[4]{0:T(256)}, s32[]{:T(256)}) tuple(%from, %a, %turned)
  %while.3 = (s32[]{:T(256)}, f32[4]{0:T(256)}, s32[]{:T(256)}) while(%begin), condition=%like_before, body=%gradient
  %first = u32[]{:T(256)} constant(1)
  %outset = u32[]{:T(256)} copy(%first)
  %sliced = (s32[]{:T(256)}, f32[4]{0:T(256)}, u32[]{:T(256)}) tuple(%a, %a, %outset)
  %while.4 = (s32[]{:T(256)}, f32[4]{0:T(256)}, u32[]{:T(256)}) while(%sliced), condition=%slices_left, body=%two_slices
  %while.2 = (s32[]{:T(256)}, f32[4]{0:T(256)}) while(%start), condition=%until_done, body=%body
  ROOT %r = f32[4]{0:T(256)} copy(%a), backend_config={"flag":[],"estimated_cycles":"7"}
}
"""


def test_instructions_in_loops_count_with_the_trip_count():
    """Also in loops that count down or run as often as another one; if data decides, once, in `unknown_loops`.

    The loop of a windowed einsum counts by two in an element that is not the first: 1, 3, 5 and 7 are below 9. The
    instructions inside a fusion are in the fusion's own estimate.
    """
    module = Module(_TEXT, 32)
    cycles = sum(instruction.cycles * times for instruction, times in module.runs())
    assert cycles == 9 * 10 + 9 * 100 + 4 * 1000 + 1 * 10 + 7
    assert module.unknown_loops == 1


def test_largest_buffers_are_no_pointers():
    """A barrier, as XLA writes it, has the buffers of its operands."""
    module = Module(
        """HloModule small
ENTRY %main (a: f32[8]) -> f32[4] {
  %a = f32[8]{0} parameter(0)
  %before = f32[8]{0} opt-barrier(%a)
  ROOT %part = f32[4]{0} slice(%before), slice={[0:4]}
}
""",
        1,
    )
    assert [buffer.shape for buffer in module.largest_buffers(5)] == ["f32[4]"]


def test_text_that_is_not_a_module_is_an_error():
    """Not an empty module."""
    with pytest.raises(ValueError, match="expected the text of a compiled XLA module"):
        Module("nothing here", 1)
