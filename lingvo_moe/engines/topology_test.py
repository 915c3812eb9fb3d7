"""Slices have libtpu's names; mistakes are reported before libtpu aborts the process; out of memory is a result."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from lingvo_moe.engines import topology
from lingvo_moe.engines.topology import Slice
from lingvo_moe.errors import OutOfMemory, UserError
from lingvo_moe.lazy import tf
from lingvo_moe.program import lower
from lingvo_moe.sharding.layout import AxisRule, DeviceMesh, Layout, Spec
from lingvo_moe.testing import harness
from lingvo_moe.utils.counts import counted

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "name, pattern",
    [
        ("", "cannot be parsed"),
        ("v3", "cannot be parsed"),
        ("v3:2", "cannot be parsed"),
        ("v3:2x2x1x1", "cannot be parsed"),
        ("v3:ax2", "cannot be parsed"),
        ("v33:2x2", "no such TPU generation. Did you mean v3"),
        ("v9:2x2", "Known: v2, v3, v4"),
        ("v3:0x2x1", "none may be 0"),
        ("v3:2x2x0", "none may be 0"),
        ("v3:3x2x1", "the first two sizes must be even"),
        ("v5e:32x32", "the largest of v5e has 16x16 chips"),  # libtpu would abort the process
        ("v5e:16x16x2", "the largest of v5e has 16x16 chips"),  # and here
        ("v6e:8x32", "the largest of v6e has 16x16 chips"),
        ("v3:32x32x2", "the largest of v3 has 32x32 chips"),
        ("v4:32x32x8", "the largest of v4 has 4096 chips"),
    ],
)
def test_a_name_without_a_slice_is_reported_with_an_example(name, pattern):
    with pytest.raises(UserError, match=f"--topology={name}.*{pattern}"):
        Slice.of(name)


@pytest.mark.parametrize("generation", topology.GENERATIONS)
def test_every_generation_has_a_largest_slice(generation):
    """Of both notations, with and without a third size."""
    assert topology.exists(generation, (16, 16, 1)) and topology.exists(generation, (16, 16))
    assert not topology.exists(generation, (2048, 2048, 1)) and not topology.exists(generation, (2048, 2048))


def test_no_slice_of_more_memory_is_larger_than_any():
    """18,432 cores of tpu7x are more than the chips of a v5p pod."""
    assert Slice("tpu7x:16x24x24", "tpu7x", (16, 24, 24), tuple(range(18432))).with_more_memory() is None


@pytest.mark.parametrize("name", ["v5e:16x16", "v6e:16x16", "v2:16x16x1", "v3:32x32x1"])
def test_libtpu_compiles_for_the_largest_flat_slices(name):
    """The process would end if libtpu's own limit were lower than ours. An option makes `of` compile a program."""
    assert len(Slice.of(name, ["xla_tpu_run_space_to_batch=false"]).devices) >= 256


@pytest.mark.parametrize("name", topology.GENERATIONS.values())
def test_the_examples_in_messages_are_slices(name):
    tpu = Slice.of(name)
    assert len(tpu.devices) in (np.prod(tpu.chips), 2 * np.prod(tpu.chips)) and name.startswith(tpu.generation)


@pytest.mark.parametrize(
    "cores, name", [(8, "v3:2x2x1"), (128, "v3:8x8x1"), (512, "v3:16x16x1"), (2048, "v3:32x32x1"), (64, "v3:8x4x1")]
)
def test_v3_slices_are_as_square_as_possible(cores, name):
    assert topology.v3_slice(cores) == name and len(Slice.of(name).devices) == cores


@pytest.mark.parametrize("cores", [0, 1, 2, 4, 12, 24 + 4, 8 * 97, 4096])
def test_core_counts_without_a_slice_are_refused(cores):
    with pytest.raises(UserError, match=f"no TPU v3 slice of {counted(cores, 'core')}"):
        topology.v3_slice(cores)


def _square(size: int, mesh: str = "8"):
    layout = Layout.of(DeviceMesh.parse(mesh))
    spec = {"x": np.broadcast_to(np.float32(0), (8, size, size))}  # takes no memory here
    return harness.lower_for(
        lambda inputs: {"y": tf.matmul(inputs["x"], inputs["x"])}, spec, layout, {"x": "Bmh", "y": "Bmh"}
    )


def test_a_program_is_compiled_without_the_slice():
    """Each of 8 cores reads one matrix of 4 MiB, and writes one."""
    compiled = Slice.of("v3:2x2x1").compile(_square(1024))
    memory = compiled.memory()
    assert (memory.argument_size_in_bytes, memory.output_size_in_bytes) == (4 * 2**20, 4 * 2**20)
    assert '"estimated_cycles":"' in compiled.hlo()


@pytest.mark.parametrize("name", ["v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_modules_of_generations_with_sparse_cores_can_be_read(name):
    """Left to itself, the compiler gives large collectives to SparseCores, in a form that jaxlib does not read."""
    tpu = Slice.of(name)
    cores = len(tpu.devices)
    spec = {"x": np.broadcast_to(np.float32(0), (8, 2048, 2048))}  # takes no memory here
    program = harness.lower_for(
        lambda inputs: {"y": tf.reduce_sum(inputs["x"], axis=0)},
        spec,
        Layout.of(DeviceMesh((cores,))),
        {"x": "Bmh", "y": "mh"},
    )
    hlo = tpu.compile(program).hlo()
    assert "all-reduce" in hlo and "async-update" not in hlo


def test_large_products_are_in_slices_from_a_threshold_on():
    """Rows and columns are distributed: an AllGather of the columns, 16 MiB in bfloat16, or CollectivePermutes of them.

    Of T(96L)'s layer. The permutes are asynchronous, unlike those of other programs for TPU v3.
    """
    layout = Layout(DeviceMesh((8,)), (AxisRule("BH", ("x",)),))
    specs = {"x": Spec((128 * 128, 1024), "bfloat16", "BM"), "w": Spec((1024, 8192), "bfloat16", "MH")}

    def product(inputs: dict) -> dict:
        factors = (layout.annotate(inputs[name], axes) for name, axes in (("x", "BM"), ("w", "MH")))
        return {"y": layout.annotate(tf.matmul(*factors), "BH")}

    program = lower("product", product, specs, {"y": "BH"}, layout)
    for threshold, in_slices in ((-1, False), (17, False), (16, True), (0, True)):
        compiled = Slice.of("v3:2x2x1").compile(dataclasses.replace(program, windowed_einsum_mib=threshold))
        assert (" collective-permute-start(" in compiled.hlo()) == in_slices
        assert (" all-gather(" in compiled.hlo()) != in_slices


def test_out_of_memory_is_reported_with_its_sizes():
    """A matrix of 10 GiB and its product with itself need more than a core's 16 GB."""
    with pytest.raises(OutOfMemory) as caught:
        Slice.of("v3:2x2x1").compile(_square(51200))
    assert caught.value.needed > caught.value.available > 15 * 2**30


@pytest.mark.parametrize("name, larger", [("v3:2x2x1", "v5p:2x2x2"), ("v5p:2x2x1", None), ("tpu7x:2x2x1", None)])
def test_a_slice_with_more_memory_is_of_as_many_cores(name, larger):
    """There is none for those of v5p, 95 GiB, and tpu7x, 96 GiB: a second compilation would not fit either."""
    found = Slice.of(name).with_more_memory()
    assert (found and found.name) == larger


def test_a_mesh_of_another_size_is_refused():
    with pytest.raises(UserError, match="v3:2x2x1 has 8 cores; the mesh is 4, of 4. Pass --mesh=8"):
        Slice.of("v3:2x2x1").compile(_square(8, "4"))


def test_a_missing_libtpu_is_reported_with_the_remedy(monkeypatch):
    monkeypatch.setattr(topology.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="libtpu, the TPU's compiler, is not installed.*make setup"):
        Slice.of("v3:2x2x1")
