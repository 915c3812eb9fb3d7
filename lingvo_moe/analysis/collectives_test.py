"""Protects the reading of collectives: every one is found, wherever the compiler put it, with its size and group."""

from __future__ import annotations

import collections
import dataclasses
import functools
import re

import numpy as np
import pytest

from lingvo_moe import experiment
from lingvo_moe.analysis.collectives import Collective, find_collectives, missed
from lingvo_moe.analysis.hlo import Module
from lingvo_moe.engines.cluster import Cluster, target_of
from lingvo_moe.lazy import tf
from lingvo_moe.program import Program
from lingvo_moe.sharding.layout import DeviceMesh, Layout
from lingvo_moe.testing import harness
from lingvo_moe.testing.plans import stride

# A loop of nine trips, a fused ReduceScatter in it, a branch, a call, the start of an asynchronous AllGather.
_TEXT = """HloModule small, is_scheduled=true

%add (l: f32[], r: f32[]) -> f32[] {
  %l = f32[] parameter(0)
  %r = f32[] parameter(1)
  ROOT %sum = f32[] add(%l, %r)
}

%all-reduce-scatter.1 (input: f32[4,64]) -> f32[32,8] {
  %input = f32[4,64]{1,0} parameter(0)
  %as_rows = f32[64,4]{1,0} bitcast(%input)
  %all-reduce.1 = f32[64,4]{1,0} all-reduce(%as_rows), channel_id=7, replica_groups={{0,1},{2,3},{4,5},{6,7}}, \
to_apply=%add
  %again = f32[64,4]{1,0} bitcast(%all-reduce.1)
  %first = u32[] constant(0)
  ROOT %kept = f32[32,4]{1,0} dynamic-slice(%again, %first, %first), dynamic_slice_sizes={32,4}
}

%fused_sum (whole: f32[16]) -> f32[16] {
  %whole = f32[16]{0} parameter(0)
  %all-reduce.2 = f32[16]{0} all-reduce(%whole), replica_groups=[1,8]<=[8], to_apply=%add
  ROOT %negated = f32[16]{0} negate(%all-reduce.2)
}

%condition (c: (s32[], f32[4])) -> pred[] {
  %c = (s32[], f32[4]{0}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %limit = s32[] constant(9)
  ROOT %below = pred[] compare(%i, %limit), direction=LT
}

%body (b: (s32[], f32[4])) -> (s32[], f32[4]) {
  %b = (s32[], f32[4]{0}) parameter(0)
  %x = f32[4]{0} get-tuple-element(%b), index=1
  %dispatched = bf16[2,128,64]{2,1,0:T(8,128)(2,1)} all-to-all(%x), \
replica_groups=mesh['axis_0'=8,'axis_1'=4] {'axis_0'}, dimensions={1}, metadata={op_name="jit(call)/while/einsum"}
  %fusion.1 = f32[32,4]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1, control-predecessors={%add}, \
metadata={op_name="optimizer/update"}
  %before = s32[] get-tuple-element(%b), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%before, %one)
  ROOT %t = (s32[], f32[4]{0}) tuple(%next, %x)
}

%branch (e: f32[4]) -> f32[4] {
  %e = f32[4]{0} parameter(0)
  ROOT %neighbours = f32[4]{0} collective-permute(%e), source_target_pairs={{0,1},{1,0}}
}

%other_branch (o: f32[4]) -> f32[4] {
  ROOT %o = f32[4]{0} parameter(0)
}

%called (d: f32[4]) -> f32[4] {
  %d = f32[4]{0} parameter(0)
  ROOT %scattered = f32[2]{0} reduce-scatter(%d), replica_groups=[4,2]<=[8], dimensions={0}, to_apply=%add
}

ENTRY %main (a: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0)
  %from = s32[] constant(0)
  %start = (s32[], /*index=1*/f32[4]{0}) tuple(%from, %a)
  %while.1 = (s32[], f32[4]{0}) while(%start), condition=%condition, body=%body
  %both = (f32[]{:T(256)}, f32[8]{0:T(256)}) all-reduce(%a, %a), replica_groups=[4,8]<=[8,4]T(1,0), to_apply=%add
  %fusion.2 = f32[16]{0} fusion(%a), kind=kCustom, calls=%fused_sum
  %either = f32[4]{0} conditional(%a, %a, %a), branch_computations={%branch, %other_branch}
  %call.1 = f32[4]{0} call(%a), to_apply=%called
  %gather-start = (f32[4]{0}, f32[32]{0}) all-gather-start(%a), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
  %meanwhile = f32[4]{0} copy(%a), backend_config={"estimated_cycles":"5"}
  %gathered = f32[32]{0} all-gather-done(%gather-start)
  ROOT %result = f32[4]{0} copy(%a), backend_config={"estimated_cycles":"7"}
}
"""


def test_every_collective_has_its_kind_bytes_group_and_times():
    """In the three notations of groups; an all-reduce of which a device keeps a slice is a ReduceScatter."""
    assert find_collectives(Module(_TEXT, 32)) == [
        Collective("dispatched", "all-to-all", 2 * 128 * 64 * 2, tuple(range(0, 32, 4)), 9, "jit(call)/while/einsum"),
        Collective("7", "reduce-scatter", 32 * 4 * 4, (0, 1), 9, "optimizer/update"),
        Collective("both", "all-reduce", 4 + 32, tuple(range(0, 32, 4)), 1, ""),
        Collective("all-reduce.2", "all-reduce", 64, tuple(range(8)), 1, ""),
        Collective("neighbours", "collective-permute", 16, tuple(range(32)), 1, "", pairs=((0, 1), (1, 0))),
        Collective("scattered", "reduce-scatter", 8, (0, 1), 1, ""),
        Collective("gather-start", "all-gather", 128, tuple(range(4)), 1, "", overlapped_cycles=5),
    ]


@pytest.mark.parametrize("mesh, group, spacing", [("8", 8, 1), ("4x2", 4, 2)])
def test_collectives_of_a_compiled_loop_count_with_its_trips(mesh, group, spacing):
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
    found = find_collectives(Module(text, 8))
    assert {(c.kind, c.bytes, c.group_size, stride(c)) for c in found} == {("all-reduce", 16 * 4, group, spacing)}
    assert sum(c.times for c in found) == 5


_REPEATS = 3  # of a model's loop over its layers: unlike the trips of any other loop, and of the two mesh axes
_TINY = [
    f"model.num_layers={_REPEATS}",
    "model.model_dim=128",
    "model.hidden_dim=256",
    "model.num_heads=4",
    "model.head_dim=32",
    "model.target_vocabulary=256",
    "model.residual_dropout=0",
    "input.target_length=32",
    "input.batch_size=16",
]
_WITH_EXPERTS = [*_TINY, f"model.num_layers={2 * _REPEATS}", "model.num_experts=4", "model.num_groups=8"]
_LOOP = re.compile(r" while\(.*?body=%([\w.\-]+)")


def dumb_count(text: str) -> collections.Counter[str]:
    """Returns runs by kind from a plain search: every channel once, or _REPEATS times if it is in a loop's body."""
    bodies, callers, times = set(_LOOP.findall(text)), {}, {}
    computation = ""
    lines = []
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            computation = line.removeprefix("ENTRY ").lstrip("%").partition(" ")[0]
        callers |= dict.fromkeys(re.findall(r"calls=%([\w.\-]+)", line), computation)
        lines.append((computation, line))
    for computation, line in lines:
        kind = re.search(r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\(", line)
        if kind and "=" in line:
            channel = re.search(r"channel_id=\d+", line)[0]
            name = "reduce-scatter" if computation.startswith("all-reduce-scatter") else kind[1]
            times[name, channel] = _REPEATS if bodies & {computation, callers.get(computation)} else 1
    counts = collections.Counter()
    for (name, _), runs in times.items():
        counts[name] += runs
    return counts


@functools.cache
def _lowered(name: str, platform: str) -> Program:
    """Returns a training step for eight devices: one for all slices, one for all clusters."""
    settings = _WITH_EXPERTS if name.startswith("hybrid") else _TINY
    config = dataclasses.replace(experiment.get(name, settings, DeviceMesh.parse("4x2")), platform=platform)
    return config.steps.train(config.batch_specs())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, topology",
    [
        ("hybrid_lm.Small", "v5e:2x4"),  # the compiler splits its AllGathers over fusions
        ("dense_lm.Small", "v2:2x2x1"),
        ("dense_lm.Small", "v3:2x2x1"),
        ("dense_lm.Small", "v4:2x2x1"),
        ("dense_lm.Small", "v5p:2x2x2"),
        ("dense_lm.Small", "v6e:2x4"),
        ("dense_lm.Small", "tpu7x:2x2x1"),
        ("dense_lm.Small", "a100:1x8"),
        ("dense_lm.Small", "b200:1x8"),
    ],
)
def test_no_collective_of_a_compiled_module_is_missed(name, topology):
    """Against a dumb search of the text: as many of each kind, and none that the module's own check would report."""
    target = target_of(topology)
    text = target.compile(_lowered(name, "gpu" if isinstance(target, Cluster) else "")).hlo()
    module, runs = Module(text, 8), collections.Counter()
    for collective in find_collectives(module):
        runs[collective.kind] += collective.times
    assert runs == dumb_count(text) and runs["reduce-scatter"] and not missed(text, module)


def _gathering(parts: dict[str, str]) -> str:
    """Returns _TEXT with a fusion of each name, of an AllGather on channel 9 that has these attributes."""
    fused = "".join(
        f"""%fused_{name} (of_{name}: f32[4]) -> f32[32] {{
  %of_{name} = f32[4]{{0}} parameter(0)
  ROOT %all-gather.{name} = f32[32]{{0}} all-gather(%of_{name}), channel_id=9, replica_groups=[1,8]<=[8], \
dimensions={{0}}{attributes}
}}

"""
        for name, attributes in parts.items()
    )
    calls = "".join(f"  %{name} = f32[32]{{0}} fusion(%a), kind=kCustom, calls=%fused_{name}\n" for name in parts)
    return _TEXT.replace("ENTRY", f"{fused}ENTRY").replace("  ROOT %result", f"{calls}  ROOT %result")


def _chain(number: int) -> str:
    return f', frontend_attributes={{chain_id="{number}"}}'


def _gathers(parts: dict[str, str]) -> list[Collective]:
    """Returns the collectives that `_gathering` adds to _TEXT, after a check that none is missed."""
    text = _gathering(parts)
    module = Module(text, 32)
    assert not missed(text, module)
    found, others = find_collectives(module), find_collectives(Module(_TEXT, 32))
    assert found[: len(others)] == others
    return found[len(others) :]


def test_parts_of_an_asynchronous_collective_count_once():
    """Newer generations split an AllGather over fusions, with other work between its start and its end."""
    parts = {name: _chain(3) for name in ("async-collective-start", "fusion.9", "async-collective-done")}
    assert _gathers(parts) == [Collective("9", "all-gather", 128, tuple(range(8)), 1, "")]


@pytest.mark.parametrize(
    "first, second", [("", ""), (_chain(3), ""), ("", _chain(3)), (_chain(3), _chain(4))], ids=lambda text: text[-4:-2]
)
def test_unrelated_collectives_of_one_channel_all_count(first, second):
    """Alike in channel, kind, size and computation, but not parts of one chain: each sends its bytes."""
    assert len(_gathers({"gather.1": first, "gather.2": second})) == 2


@pytest.mark.parametrize(
    "groups, first",
    [
        ("{{0,4},{1,5},{2,6},{3,7}}", (0, 4)),
        ("{}", (0, 1, 2, 3, 4, 5, 6, 7)),
        ("[4,2]<=[8]", (0, 1)),
        ("[2,4]<=[4,2]T(1,0)", (0, 2, 4, 6)),
        ("[2,4]<=[2,2,2]T(1,0,2)", (0, 1, 4, 5)),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", (0, 2, 4, 6)),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_1','axis_0'}", (0, 1, 2, 3, 4, 5, 6, 7)),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_0':(1)2}", (0, 4)),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_0':(2)2}", (0, 2)),
        ("mesh['axis_0'=4,'axis_1'=1,'axis_2'=2], device_ids=(0,4,2,6,1,5,3,7) {'axis_0':(2)2}", (0, 2)),
        ("mesh['axis_0'=4,'axis_1'=1,'axis_2'=2], device_ids=(0,4,2,6,1,5,3,7) {'axis_0':(1)2}", (0, 1)),
        ("mesh['axis_0'=2,'axis_1'=1,'axis_2'=4], device_ids=([2,2,2]T(1,0,2)) {'axis_0'}", (0, 2)),
        ("mesh['axis_0'=2,'axis_1'=4], device_ids=([8]) {'axis_0'}", (0, 4)),
    ],
)
def test_groups_are_read_in_every_notation(groups, first):
    """The members of the first group by hand; they decide the modelled time."""
    text = _TEXT.replace("replica_groups=[4,8]<=[8,4]T(1,0)", f"replica_groups={groups}")
    both = next(c for c in find_collectives(Module(text, 8)) if c.channel == "both")
    assert both.group == first


def test_groups_in_an_unknown_notation_are_an_error():
    """Not silently all devices."""
    text = _TEXT.replace("replica_groups=[4,8]<=[8,4]T(1,0)", "replica_groups=new(8)")
    with pytest.raises(ValueError, match="replica groups of both are not understood: new"):
        find_collectives(Module(text, 8))


def test_a_reduction_that_is_also_used_whole_is_an_all_reduce():
    """Each device then keeps all of it."""
    text = _TEXT.replace("  %first = u32[]", "  %other = f32[64,4]{1,0} negate(%again)\n  %first = u32[]")
    assert [c.kind for c in find_collectives(Module(text, 8)) if c.channel == "7"] == ["all-reduce"]


def test_a_call_made_twice_runs_its_collectives_twice_and_an_end_runs_none():
    """Also those in fusions; `async-done` names the computation that its start ran."""
    text = _TEXT.replace(
        "  ROOT %scattered", "  %fusion.3 = f32[16]{0} fusion(%d), kind=kCustom, calls=%fused_sum\n  ROOT %scattered"
    ).replace(
        "  ROOT %result",
        """  %call.2 = f32[4]{0} call(%a), to_apply=%called
  %started = ((f32[4]{0}), f32[2]{0}, u32[]) async-start(%a), calls=%called
  %ended = f32[2]{0} async-done(%started), calls=%called
  ROOT %result""",
    )
    found = [collective.channel for collective in find_collectives(Module(text, 8))]
    assert found.count("scattered") == 3 and found.count("all-reduce.2") == 4


def test_a_missed_collective_is_named():
    """A plan refuses a module of which it would miss one: here, of a computation that nothing calls."""
    module = Module(_TEXT.replace("branch_computations={%branch, %other_branch}", "custom=1"), 32)
    assert missed(_TEXT, Module(_TEXT, 32)) == [] and missed(_TEXT, module) == ["neighbours"]
