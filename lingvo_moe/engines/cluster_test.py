"""Clusters of GPUs that do not exist here: their names, their compiler, and what fits them."""

from __future__ import annotations

import dataclasses
import re

import jax
import numpy as np
import pytest

from lingvo_moe.engines import cluster
from lingvo_moe.engines.cluster import Cluster
from lingvo_moe.engines.topology import Slice
from lingvo_moe.errors import OutOfMemory, UserError
from lingvo_moe.lazy import tf
from lingvo_moe.sharding.layout import DeviceMesh, Layout
from lingvo_moe.testing import harness


def _product(size: int, devices: int):
    """A program that sums products of sharded matrices over all devices."""
    spec = {"x": np.broadcast_to(np.float32(0), (16, size, size))}  # takes no memory here
    return harness.lower_for(
        lambda inputs: {"y": tf.reduce_sum(tf.matmul(inputs["x"], inputs["x"]), axis=0)},
        spec,
        Layout.of(DeviceMesh((devices,))),
        {"x": "Bmh", "y": "mh"},
    )


@pytest.mark.parametrize(("name", "devices"), [("h100:2x8", 16), ("H200:1x4", 4), ("b200:1x8", 8), ("a100:2x4", 8)])
def test_a_program_is_compiled_without_the_cluster(name, devices):
    """Every GPU of the table: the module is partitioned, and its memory is that of one GPU."""
    described = Cluster.of(name)
    assert len(described.devices) == devices
    assert described.gpu is cluster.GPUS[described.name.partition(":")[0]]
    compiled = described.compile(_product(512, devices))
    assert compiled.memory().argument_size_in_bytes == 16 // devices * 512 * 512 * 4
    assert "all-reduce" in compiled.hlo()
    assert (compiled.schedule is None) == name.startswith("a100")


def test_optimised_machine_code_changes_nothing_that_a_plan_reads():
    """So plans do not wait for it, and record how they were compiled: the module, its memory and the schedule."""
    option, program = "xla_gpu_disable_gpuasm_optimizations", _product(512, 8)
    assert Cluster.of("h100:1x8").compiler_options == (f"{option}=true",)
    clusters = [Cluster.of("h100:1x8", [f"{option}={value}"]) for value in ("true", "false")]
    quick, optimised = (_without_ids(described.compile(program)) for described in clusters)
    assert quick == optimised


def _without_ids(compiled) -> tuple[str, str, str]:
    """What a plan reads of a compiled program; XLA numbers the computations of a process."""
    return compiled.hlo(), str(compiled.memory()), re.sub(r"\bid: \d+", "", compiled.schedule)


def test_windowed_einsums_by_xla_are_refused():
    """Its option for GPUs changes nothing."""
    program = dataclasses.replace(_product(512, 8), windowed_einsum_mib=0)
    with pytest.raises(UserError, match="windowed_einsum_mib=0: XLA supports windowed einsums only on TPUs"):
        Cluster.of("h100:1x8").compile(program)


def test_what_does_not_fit_is_refused():
    """XLA compiles for a GPU whatever its memory; two matrices of 40 GiB and their products are too much for one."""
    described = Cluster.of("h100:1x8")
    with pytest.raises(OutOfMemory) as caught:
        described.compile(_product(103_000, 8))
    assert caught.value.needed > 120e9 > 84e9 > caught.value.available > 75e9
    assert described.with_more_memory().compile(_product(103_000, 8)).memory().argument_size_in_bytes > 80e9


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h100", "--topology=h100 cannot be parsed; expected a GPU, the number of nodes and the GPUs of a node"),
        ("h100:8", "--topology=h100:8 cannot be parsed"),
        ("h10:1x8", "no such GPU. Did you mean .*h100.*Known: a100, h100, h200, b200"),
        ("h100:0x8", "0 nodes of 8 GPUs; expected at least one node of 1 to 8 GPUs, for instance h100:4x8"),
        ("h100:2x16", "2 nodes of 16 GPUs"),
    ],
)
def test_malformed_names_are_errors(name, message):
    with pytest.raises(UserError, match=message):
        Cluster.of(name)


@pytest.mark.parametrize(
    ("name", "kind"), [("v3:2x2x1", Slice), ("V5E:2X2", Slice), ("b200:1x8", Cluster), ("H200:1x8", Cluster)]
)
def test_a_name_stands_for_a_slice_or_a_cluster(name, kind):
    """Its first part decides, in letters of any case."""
    described = cluster.target_of(name)
    assert isinstance(described, kind) and described.name == name.lower()


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("gb200:4x8", r" Did you mean b200\b[^?]*\?"),
        ("h10:1x8", r" Did you mean h100\b[^?]*\?"),
        ("v5:2x2", r" Did you mean v5\w\b[^?]*\?"),
        ("rtx4090:1x8", ""),
        ("mi300x:1x8", ""),
        (":4x8", ""),
    ],
)
def test_an_unknown_name_lists_tpus_and_gpus(name, suggestion):
    """Whoever mistypes a GPU is not told of TPUs alone; what is like no name gets no suggestion."""
    known = "Known: the TPUs v2, v3, .*tpu7x, as in v3:32x32x1; the GPUs a100, h100, h200, b200, as in h100:4x8"
    with pytest.raises(UserError, match=f"^--topology={name}: no such TPU or GPU[.]{suggestion} {known}"):
        cluster.target_of(name)


def test_a_mesh_of_another_size_is_refused():
    with pytest.raises(UserError, match="h100:1x8 has 8 GPUs; the mesh is 4, of 4. Pass --mesh=8, or a cluster of 4"):
        Cluster.of("h100:1x8").compile(_product(8, 4))


@pytest.mark.parametrize(
    "error, reported",
    [
        (
            "UNAVAILABLE: No PTX compilation provider is available. Neither ptxas/nvlink",
            "neither ptxas nor.*make setup",
        ),
        ("INTERNAL: Couldn't find output tile sizes that satisfy hlo: %dot.920", "xla_gpu_enable_triton_gemm=false"),
    ],
)
def test_an_error_of_the_compiler_is_reported_with_the_remedy(error, reported, monkeypatch):
    """XLA's own errors name none: of a machine without ptxas, and of a product that it cannot divide into tiles."""

    def fails(*_):
        raise jax.errors.JaxRuntimeError(error)

    monkeypatch.setattr(cluster.compilation, "compile_program", fails)
    with pytest.raises(UserError, match=reported):
        Cluster.of("h100:1x8").compile(_product(8, 8))


def test_a_missing_compiler_is_reported_with_the_remedy(monkeypatch):
    monkeypatch.setattr(cluster.cuda, "has_compiler", lambda: False)
    with pytest.raises(UserError, match="CUDA compiler is not installed.*make setup"):
        Cluster.of("h100:1x8")
