"""Protects the trip counts of loops: a loop that is counted too seldom makes a plan too fast."""

from __future__ import annotations

import pytest

from lingvo_moe.analysis.hlo import Module

_LOOP = """HloModule loop, is_scheduled=true

%condition (c: (s32[])) -> pred[] {{
  %c = (s32[]{{:T(256)}}) parameter(0)
  %limit = s32[]{{:T(256)}} constant({limit})
  %i = s32[]{{:T(256)}} get-tuple-element(%c), index=0
  ROOT %more = pred[]{{:T(1024)}} compare(%i, %limit), direction={direction}
}}

%body (b: (s32[])) -> (s32[]) {{
  %b = (s32[]{{:T(256)}}) parameter(0)
  %j = s32[]{{:T(256)}} get-tuple-element(%b), index=0
  %copied = s32[]{{:T(256)}} copy(%j)
  %step = s32[]{{:T(256)}} constant({step})
  %next = s32[]{{:T(256)}} add(%copied, %step), control-predecessors={{%copied}}
  ROOT %t = (s32[]{{:T(256)}}) tuple(%next)
}}

%gradient_condition (d: (s32[], s32[])) -> pred[] {{
  %d = (s32[]{{:T(256)}}, s32[]{{:T(256)}}) parameter(0)
  %k = s32[]{{:T(256)}} get-tuple-element(%d), index=0
  %end = s32[]{{:T(256)}} get-tuple-element(%d), index=1
  ROOT %less = pred[]{{:T(1024)}} compare(%k, %end), direction=NE
}}

%gradient (e: (s32[], s32[])) -> (s32[], s32[]) {{
  %e = (s32[]{{:T(256)}}, s32[]{{:T(256)}}) parameter(0)
  %l = s32[]{{:T(256)}} get-tuple-element(%e), index=0
  %kept = s32[]{{:T(256)}} get-tuple-element(%e), index=1
  %gradient_step = s32[]{{:T(256)}} constant({step})
  %m = s32[]{{:T(256)}} add(%l, %gradient_step)
  ROOT %u = (s32[]{{:T(256)}}, s32[]{{:T(256)}}) tuple(%m, %kept)
}}

ENTRY %main (a: s32[]) -> s32[] {{
  %a = s32[]{{:T(256)}} parameter(0)
  %first = s32[]{{:T(256)}} constant({first})
  %begin = s32[]{{:T(256)}} copy(%first)
  %state = (s32[]{{:T(256)}}) tuple(%begin)
  %while.1 = (s32[]{{:T(256)}}) while(%state), condition=%condition, body=%body
  %last = s32[]{{:T(256)}} get-tuple-element(%while.1), index=0
  %kept_state = (s32[]{{:T(256)}}, s32[]{{:T(256)}}) tuple(%begin, %last)
  %while.2 = (s32[]{{:T(256)}}, s32[]{{:T(256)}}) while(%kept_state), condition=%gradient_condition, body=%gradient
  ROOT %r = s32[]{{:T(256)}} copy(%a)
}}
"""


@pytest.mark.parametrize(
    "first, step, direction, limit",
    [(0, 1, "LT", 9), (0, 1, "LE", 8), (8, -1, "GE", 0), (9, -1, "GT", 0), (3, 2, "LT", 20), (0, 1, "NE", 9)],
)
def test_a_loop_runs_as_often_as_its_counter_says(first, step, direction, limit):
    """Also one that counts down (the backward pass of `tf.scan`), and the loop that differentiates it."""
    module = Module(_LOOP.format(first=first, step=step, direction=direction, limit=limit), 1)
    times = {instruction.name: times for instruction, times in module.runs()}
    assert (times["next"], times["m"], module.unknown_loops) == (9, 9, 0)


def test_a_loop_that_never_ends_counts_once():
    """As a loop does whose end depends on data."""
    module = Module(_LOOP.format(first=0, step=1, direction="GE", limit=0), 1)
    times = {instruction.name: times for instruction, times in module.runs()}
    assert (times["next"], module.unknown_loops) == (1, 2)


def _counted(text: str, changed: str, first: int = 0, direction: str = "LT", limit: int = 9) -> tuple[int, int]:
    """How often the first loop runs if its text is another, and the number of unknown loops."""
    module = _LOOP.format(first=first, step=1, direction=direction, limit=limit)
    assert text in module
    changed_module = Module(module.replace(text, changed), 1)
    return {i.name: times for i, times in changed_module.runs()}["next"], changed_module.unknown_loops


def test_a_counter_may_be_subtracted_from():
    """9 down to 0, as XLA writes it before it makes an addition of it; a constant less the counter is no counter."""
    assert _counted(" add(%copied, %step)", " subtract(%copied, %step)", 9, "GT", 0)[0] == 9
    assert _counted(" add(%copied, %step)", " subtract(%step, %copied)") == (1, 2)


def test_a_condition_may_be_negated():
    """At least nine is not less than nine."""
    less = "  ROOT %more = pred[]{:T(1024)} compare(%i, %limit), direction=LT"
    negated = "  %done = pred[]{:T(1024)} compare(%i, %limit), direction=GE\n  ROOT %more = pred[]{:T(1024)} not(%done)"
    assert _counted(less, negated)[0] == 9


def test_a_condition_may_be_an_alternative():
    """Less than nine, or greater than nine hundred: known, though neither is true at the end."""
    less = "  ROOT %more = pred[]{:T(1024)} compare(%i, %limit), direction=LT"
    either = (
        less.replace("ROOT %more", "%less")
        + """
  %many = s32[]{:T(256)} constant(900)
  %greater = pred[]{:T(1024)} compare(%i, %many), direction=GT
  ROOT %more = pred[]{:T(1024)} or(%less, %greater)"""
    )
    assert _counted(less, either) == (9, 0)


def test_a_count_that_the_text_says_is_taken():
    """Of the compilers for CPUs and GPUs, which may have changed the counter."""
    said = ' body=%body, backend_config={"known_trip_count":{"n":"5"}}'
    assert _counted(" body=%body", said) == (5, 0)


_FUSED = """%fused_add (p: s32[]) -> s32[] {
  %p = s32[] parameter(0)
  %two = s32[] constant(2)
  ROOT %sum = s32[] add(%p, %two)
}

%body ("""


def test_a_counter_may_be_added_to_in_a_fusion():
    """As the compiler for GPUs writes it."""
    module = _LOOP.format(first=1, step=1, direction="LT", limit=9).replace("%body (", _FUSED)
    module = module.replace(" add(%copied, %step)", " fusion(%copied), kind=kLoop, calls=%fused_add")
    assert {i.name: times for i, times in Module(module, 1).runs()}["next"] == 4


@pytest.mark.parametrize(
    "text, changed",
    [
        ("tuple(%begin)", "tuple(%a)"),
        (" add(%copied, %step)", " add(%copied, %copied)"),
        (" add(%copied, %step)", " multiply(%copied, %step)"),
        ("tuple(%next)", "tuple(%j)"),
    ],
    ids=["starts at a parameter", "adds data", "multiplies", "does not change"],
)
def test_a_loop_without_a_counter_counts_once(text, changed):
    """As the page says: nothing is assumed that the text contradicts. Nor is the loop known that differentiates it."""
    assert _counted(text, changed) == (1, 2)


@pytest.mark.parametrize(
    "text, changed",
    [
        ("(s32[]{:T(256)}) tuple(%begin)", "(s32[]{:T(256)}) custom-call(%begin)"),
        ("ROOT %t = (s32[]{:T(256)}) tuple(%next)", "ROOT %t = (s32[]{:T(256)}) custom-call(%next)"),
    ],
)
def test_a_counter_whose_change_is_not_in_the_text_counts_from_0_by_1(text, changed):
    """A state need not be made by a `tuple`: it is also a parameter, a loop or a call."""
    module = _LOOP.format(first=0, step=1, direction="LT", limit=9)
    assert text in module
    times = {instruction.name: times for instruction, times in Module(module.replace(text, changed), 1).runs()}
    assert times["next"] == 9
