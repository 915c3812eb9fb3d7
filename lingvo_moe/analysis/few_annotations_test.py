"""A Transformer that annotates the papers' tensors alone has the values and the communication of the annotated one.

GSPMD section 5.1: "by annotating just 7 tensors per Transformer layer". The layouts `gspmd_few` and `gshard_few`.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib
import pathlib
import re

import numpy as np
import pytest

from lingvo_moe import tree
from lingvo_moe.analysis import miniature
from lingvo_moe.analysis.collectives import find_collectives
from lingvo_moe.analysis.hlo import Module
from lingvo_moe.engines.topology import Slice
from lingvo_moe.layers.attention import MultiHeadAttention, causal_mask
from lingvo_moe.layers.base import Context
from lingvo_moe.layers.feed_forward import DenseFeedForward
from lingvo_moe.layers.mixture_of_experts import MixtureOfExperts
from lingvo_moe.layers.relative_bias import RelativeBias
from lingvo_moe.layers.transformer import Masks, TransformerLayer, TransformerStack
from lingvo_moe.lazy import tf
from lingvo_moe.program import Program
from lingvo_moe.sharding.layout import DeviceMesh, Layout
from lingvo_moe.testing import harness
from lingvo_moe.testing.plans import stride

pytestmark = pytest.mark.slow

BATCH, LENGTH, MODEL, HIDDEN, HEADS, HEAD_DIM, EXPERTS = 16, 16, 32, 64, 4, 8, 8
# Relative to the largest element: two to four layers of products over 32 and 64, summed in another order.
TOLERANCE = 64 * harness.FLOAT32_ROUNDING

_ATTENTION = MultiHeadAttention(model_dim=MODEL, num_heads=HEADS, head_dim=HEAD_DIM)
_DENSE = TransformerLayer(attention=_ATTENTION, feed_forward=DenseFeedForward(model_dim=MODEL, hidden_dim=HIDDEN))
_EXPERTS = TransformerLayer(
    attention=_ATTENTION,
    feed_forward=MixtureOfExperts(model_dim=MODEL, hidden_dim=HIDDEN, num_experts=EXPERTS, num_groups=BATCH),
)
# The layer pattern of each family's stack, its mesh, and the layouts that annotate all tensors and the papers'.
FAMILIES = {
    "dense": ((_DENSE,), (4, 2), ("gspmd", "gspmd_few")),
    "relative": ((_DENSE,), (4, 2), ("gspmd", "gspmd_few")),
    "hybrid": ((_DENSE, _EXPERTS), (4, 2), ("gspmd", "gspmd_few")),
    "moe": ((_EXPERTS,), (8,), ("gshard", "gshard_few")),
}


@functools.cache
def inputs_of(family: str) -> dict:
    random = np.random.default_rng(0)
    theta = tree.map_leaves(
        lambda weight: (weight.mean + (weight.stddev or 0.3) * random.normal(size=weight.shape)).astype(np.float32),
        _stack(family).weights(),
    )
    inputs = random.normal(size=(BATCH, LENGTH, MODEL)).astype(np.float32)
    return {"theta": theta, "inputs": inputs, "seed": np.int32([1, 2])}


def _stack(family: str) -> TransformerStack:
    bias = RelativeBias(model_dim=MODEL, num_heads=HEADS, buckets=8, distance=12, bidirectional=False)
    relative = bias if family == "relative" else None
    return TransformerStack(pattern=FAMILIES[family][0], repeats=2, relative_bias=relative, remat="full")


@functools.cache  # CPUs and TPUs compile the same program
def lowered(family: str, layout: Layout) -> Program:
    """Outputs, metrics and all gradients of a stack that is scanned and rematerialised; its products are einsums."""
    stack = _stack(family)
    logical_axes = {"inputs": "BTM", "values/outputs": "BTM", "gradients/inputs": "BTM"}
    for path, weight in tree.flatten(stack.weights()).items():
        logical_axes |= {f"{prefix}theta/{path}": weight.logical_axes for prefix in ("", "gradients/")}

    def function(inputs: dict) -> dict:
        segments = tf.ones((BATCH, LENGTH), tf.int32)
        masks = Masks(causal_mask(segments), tf.equal(segments, 0))
        context = Context(layout, inputs["seed"], platform="tpu")
        outputs, metrics = stack(inputs["theta"], inputs["inputs"], None, masks, context)
        return {"outputs": outputs, "metrics": metrics}

    return harness.lower_for(harness.with_gradients(function), inputs_of(family), layout, logical_axes)


def sent(hlo: str) -> dict[tuple[str, int, int], int]:
    """Bytes of all runs of the collectives, by kind, size and stride of the groups."""
    total: dict[tuple[str, int, int], int] = collections.defaultdict(int)
    for found in find_collectives(Module(hlo, 8)):
        total[found.kind, found.group_size, stride(found)] += found.bytes * found.times
    return dict(total)


@functools.cache
def on_cpus(family: str, name: str) -> tuple[dict[str, np.ndarray], dict]:
    """Results on eight virtual devices, and what is sent."""
    layout = Layout.of(DeviceMesh(FAMILIES[family][1]), name)
    executable = harness.engine(layout).compile(lowered(family, layout))
    return harness.arrays(executable(inputs_of(family))), sent(executable.hlo())


@pytest.mark.parametrize("family", FAMILIES)
def test_values_are_those_of_all_annotations(family):
    """Outputs, metrics and every gradient."""
    expected, found = (on_cpus(family, name)[0] for name in FAMILIES[family][2])
    for path, value in expected.items():
        atol = TOLERANCE * max(np.abs(value).max(), 1e-9)
        np.testing.assert_allclose(found[path], value, rtol=0, atol=atol, err_msg=path)


def assert_sends_no_more(found: dict, expected: dict, family: str):
    """Same kinds of collectives among the same groups, and of none more bytes; of a dense layer, exactly as many."""
    assert found.keys() == expected.keys()
    assert family != "dense" or found == expected
    more = {kind: (found[kind], expected[kind]) for kind in expected if found[kind] > expected[kind]}
    assert not more, f"bytes with few and with all annotations, by kind, size and stride of groups: {more}"


@pytest.mark.parametrize("family", FAMILIES)
def test_communication_is_that_of_all_annotations(family):
    """Forward, rematerialised and backward, on a CPU's partitioned module."""
    expected, found = (on_cpus(family, name)[1] for name in FAMILIES[family][2])
    assert_sends_no_more(found, expected, family)


def test_an_annotation_less_costs_gathers():
    """The test above can fail: without the annotation of keys and values, each of four passes gathers them over y."""
    complete = on_cpus("dense", "gspmd_few")[1]
    layout = dataclasses.replace(Layout.of(DeviceMesh((4, 2))), annotated=("BTM", "BTND", "BTH"))
    found = sent(harness.engine(layout).compile(lowered("dense", layout)).hlo())
    keys = 4 * (BATCH // 4) * LENGTH * HEADS * HEAD_DIM
    assert found == complete | {("all-gather", 2, 1): complete["all-gather", 2, 1] + 4 * keys}


def test_a_relative_bias_costs_the_sums_of_its_gradients():
    """Over the devices that divide the batch, of each one's heads, in each of two layers; the table is not gathered."""
    without, found = (on_cpus(family, "gspmd")[1] for family in ("dense", "relative"))
    gradient = 4 * HEADS // 2 * LENGTH * LENGTH
    assert found == without | {("all-reduce", 4, 2): without["all-reduce", 4, 2] + 2 * gradient}


@pytest.mark.parametrize("family", FAMILIES)
def test_tpu_compiler_completes_them_too(family):
    """The module for eight cores of a TPU v3 slice."""
    modules = []
    for name in FAMILIES[family][2]:
        layout = Layout.of(DeviceMesh(FAMILIES[family][1]), name)
        modules.append(sent(Slice.of("v3:2x2x1").compile(lowered(family, layout)).hlo()))
    assert_sends_no_more(modules[1], modules[0], family)


GOLDEN = pathlib.Path(__file__).parents[2] / "testdata" / "golden" / "collectives"
# Of a step with few annotations, how many more collectives run than with all, by kind and size of the groups.
MORE_IN_STEPS = {
    "dense_lm.Dense64BMesh8x16": {},
    "sparse_lm.MoE577B2048E": {},
    "hybrid_lm.MoE33B8E": {("all-gather", 2): -3},
}


@pytest.mark.parametrize("name", MORE_IN_STEPS)
def test_whole_steps_have_the_collectives_of_all_annotations(name):
    """Of miniatures, for eight TPU v3 cores; the golden texts are those of the registered layouts."""
    importlib.import_module(f"params.{name.partition('.')[0]}")
    small = miniature.of(name)
    few = {1: "gshard_few", 2: "gspmd_few"}[len(small.mesh.shape)]
    planned = miniature.make_plan(dataclasses.replace(small, layout=few))
    text = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
    expected = {(kind, int(group)): int(runs) for kind, group, runs in re.findall(r"(\S+) among (\d+): (\d+)", text)}
    for key, more in MORE_IN_STEPS[name].items():
        expected[key] += more
    assert {(found.kind, found.group): found.runs for found in planned.collectives} == expected
