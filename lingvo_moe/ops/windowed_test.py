"""Windowed einsums have the values and gradients of plain ones, gather nothing, need less memory, refuse misuse."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from lingvo_moe.analysis.collectives import find_collectives
from lingvo_moe.analysis.hlo import Module
from lingvo_moe.engines import pjrt
from lingvo_moe.errors import UserError
from lingvo_moe.lazy import tf
from lingvo_moe.ops.windowed import windowed_einsum
from lingvo_moe.sharding.layout import AxisRule, DeviceMesh, Layout
from lingvo_moe.testing import harness

RANDOM = np.random.default_rng(0)
SIZES = {"B": 16, "T": 3, "M": 32, "H": 24, "E": 2}


@dataclasses.dataclass(frozen=True)
class Case:
    """A product; the mesh axis x shards the first of `sharded` in each tensor; `moves` is the factor that moves."""

    equation: str
    sharded: str
    moves: str

    @property
    def axes(self) -> dict[str, str]:
        """The logical axes of the factors and of the product."""
        factors, result = self.equation.split("->")
        return dict(zip(("left", "right", "y"), (*factors.split(","), result)))

    def layout(self, *mesh: int) -> Layout:
        """On a second mesh axis, y, experts are distributed."""
        return Layout(DeviceMesh(mesh), (AxisRule(self.sharded, ("x",)), AxisRule("E", ("y",)))[: len(mesh)])


# GShard table 4: matrices sharded along A and C, or along A and B; and the result along one or the other.
CASES = {
    "columns of the right factor move": Case("BM,MH->BH", "BH", "right"),
    "rows of the left factor move": Case("BM,MH->HB", "BH", "left"),
    "contracted rows of the right factor move": Case("BM,MH->BH", "BM", "right"),
    "contracted columns of the left factor move": Case("BM,HM->BH", "MH", "left"),
    "three dimensions": Case("BTM,MH->BTH", "BH", "right"),
    "a dimension of all three tensors": Case("EBM,EMH->EBH", "BH", "right"),
    "sharded in the middle of all tensors": Case("TBM,EHM->TBEH", "BH", "right"),
}
# The sums have 16 to 144 terms, of random signs and standard deviation 1, in an order that depends on the devices.
TOLERANCE = 512 * harness.FLOAT32_ROUNDING


def factors_of(case: Case, sizes: dict[str, int] | None = None) -> dict[str, np.ndarray]:
    """Random factors."""
    sizes = sizes or SIZES
    return {
        side: RANDOM.normal(size=[sizes[axis] for axis in case.axes[side]]).astype(np.float32)
        for side in ("left", "right")
    }


def compile_form(form: str, case: Case, layout: Layout, inputs: dict, gradients: bool) -> pjrt.Executable:
    """The windowed einsum, or the product as the partitioner makes it; alone, or with its gradients."""
    axes = case.axes

    def function(i: dict) -> dict:
        if form == "windowed":
            return {"y": windowed_einsum(case.equation, i["left"], i["right"], "x", layout)}
        factors = (layout.annotate(i[side], axes[side]) for side in ("left", "right"))
        return {"y": layout.annotate(tf.einsum(case.equation, *factors), axes["y"])}

    paths = {"values/y": axes["y"], "gradients/left": axes["left"], "gradients/right": axes["right"]}
    return harness.compile_for(
        harness.with_gradients(function) if gradients else function, inputs, layout, {**axes, **paths}
    )


def plain(case: Case, inputs: dict) -> dict[str, np.ndarray]:
    """Product and gradients by NumPy; the gradient of the product is that of `harness.with_gradients`."""
    left, right, y = (case.axes[name] for name in ("left", "right", "y"))
    product = np.einsum(case.equation, inputs["left"], inputs["right"])
    weights = np.cos(np.arange(product.size)).reshape(product.shape)
    return {
        "values/y": product,
        "gradients/left": np.einsum(f"{y},{right}->{left}", weights, inputs["right"]),
        "gradients/right": np.einsum(f"{left},{y}->{right}", inputs["left"], weights),
    }


def runs(executable: pjrt.Executable, devices: int) -> dict[str, int]:
    """How often each kind of collective runs."""
    found: dict[str, int] = {}
    for collective in find_collectives(Module(executable.hlo(), devices)):
        found[collective.kind] = found.get(collective.kind, 0) + collective.times
    return found


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_of_the_plain_product_by_permutes_alone(name, devices):
    """D - 1 CollectivePermutes for the product, and as many for each of the gradients."""
    case = CASES[name]
    layout, inputs = case.layout(devices), factors_of(case)
    executable = compile_form("windowed", case, layout, inputs, gradients=False)
    assert runs(executable, devices) == {"collective-permute": devices - 1}
    shard = np.asarray(executable(inputs)["y"].addressable_shards[0].data)
    found = np.asarray(executable(inputs)["y"])
    assert shard.size == found.size // devices
    expected = np.einsum(case.equation, *inputs.values())
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())

    differentiated = compile_form("windowed", case, layout, inputs, gradients=True)
    assert runs(differentiated, devices) == {"collective-permute": 3 * (devices - 1)}
    found = harness.arrays(differentiated(inputs))
    for path, value in plain(case, inputs).items():
        np.testing.assert_allclose(found[path], value, rtol=0, atol=TOLERANCE * np.abs(value).max(), err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(4, 2), (2, 4)])
def test_other_mesh_axes_keep_their_part_of_the_product(mesh):
    """Experts on y: the slices move along x alone, and of each device's own experts."""
    case = CASES["a dimension of all three tensors"]
    layout, inputs = case.layout(*mesh), factors_of(case, {**SIZES, "E": 4})
    executable = compile_form("windowed", case, layout, inputs, gradients=False)
    found = find_collectives(Module(executable.hlo(), 8))
    slices = 4 * 4 * SIZES["M"] * SIZES["H"] // 8
    assert sum(c.times for c in found) == mesh[0] - 1
    assert {(c.kind, c.bytes) for c in found} == {("collective-permute", slices)}
    np.testing.assert_allclose(
        executable(inputs)["y"], np.einsum(case.equation, *inputs.values()), rtol=0, atol=TOLERANCE * 32
    )


# Of which factor the most memory is, so that gathering it shows.
LARGE = {"right": {"B": 64, "M": 256, "H": 1024}, "left": {"B": 1024, "M": 256, "H": 64}}


@pytest.mark.slow
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", list(CASES)[:4])
def test_less_memory_than_gathering(name, gradients):
    """The gathered form has all of the factor, of 1 MiB, on each device; a windowed einsum has two slices.

    Beside them there are a step's product and, for the gradients, the result, its gradient and the sums that move.
    """
    case = CASES[name]
    layout, inputs = case.layout(8), factors_of(case, LARGE[case.moves])
    windowed, gathered = (compile_form(form, case, layout, inputs, gradients) for form in ("windowed", "gathered"))
    assert "all-gather" in runs(gathered, 8)
    whole = inputs[case.moves].nbytes
    assert gathered.memory().temp_size_in_bytes >= whole
    assert windowed.memory().temp_size_in_bytes < whole
    assert windowed.memory().temp_size_in_bytes <= 0.5 * gathered.memory().temp_size_in_bytes


@pytest.mark.slow
def test_the_large_conflict_of_gspmds_2d_layout():
    """Table 1, finalized: in BTM,MH->BTH, x shards the batch and M of the weights; in figure 8b y shards M."""
    layout = Layout.of(DeviceMesh((4, 2)), "gspmd")
    case = Case("BTM,MH->BTH", "", "")
    inputs = factors_of(case)
    for axis in ("x", "y"):
        executable = harness.compile_for(
            lambda i, axis=axis: {"y": windowed_einsum(case.equation, i["left"], i["right"], axis, layout)},
            inputs,
            layout,
            case.axes,
        )
        assert runs(executable, 8)["collective-permute"] >= layout.mesh.axis_size(axis) - 1
        expected = np.einsum(case.equation, *inputs.values())
        np.testing.assert_allclose(executable(inputs)["y"], expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


@pytest.mark.slow
def test_bfloat16_factors():
    """The dtype of activations: sums over steps are rounded to it, as those of an AllReduce."""
    case = CASES["contracted rows of the right factor move"]
    layout, inputs = case.layout(8), factors_of(case)

    def function(i: dict) -> dict:
        factors = (tf.cast(i[side], tf.bfloat16) for side in ("left", "right"))
        return {"y": tf.cast(windowed_einsum(case.equation, *factors, "x", layout), tf.float32)}

    found = harness.run(function, inputs, layout, case.axes)["y"]
    np.testing.assert_allclose(found, inputs["left"] @ inputs["right"], rtol=0, atol=8 * 32 * harness.BFLOAT16_ROUNDING)


def test_on_one_device_it_is_the_plain_product():
    """The same program without a mesh, bit for bit."""
    case = CASES["three dimensions"]
    inputs = factors_of(case)
    found = harness.run(
        lambda i: {"y": windowed_einsum(case.equation, i["left"], i["right"], "x", case.layout(1))}, inputs
    )
    expected = harness.run(lambda i: {"y": tf.einsum(case.equation, i["left"], i["right"])}, inputs)
    np.testing.assert_array_equal(found["y"], expected["y"])


def _multiply(equation: str = "BM,MH->BH", sharded: str = "BH", axis: str = "x", columns: int = 16, **layout: str):
    result = Layout(DeviceMesh((8,)), (AxisRule(sharded, ("x",)),), **layout)
    left, right = equation.partition("->")[0].split(",")
    return windowed_einsum(
        equation, tf.zeros([16] * len(left)), tf.zeros([16] * (len(right) - 1) + [columns]), axis, result
    )


MISUSES = {
    "'y' is not an axis of the mesh 8; use one of x": lambda: _multiply(axis="y"),
    "H of MH is 12, which the 8 devices along mesh axis x do not divide": lambda: _multiply(columns=12),
    "shards B of BM, nothing of MH, B of BH; expected a different dimension": lambda: _multiply(sharded="B"),
    "shards M of BM, M of MH, nothing of BH; expected a different dimension": lambda: _multiply(sharded="M"),
    "shards B of BM, H of MH, nothing of hb; expected B or H of the result": lambda: _multiply("BM,MH->hb"),
    "H is a dimension of 3 of the three tensors; expected 2": lambda: _multiply("BHM,HMT->BHT"),
    "T is a dimension of 1 of the three tensors": lambda: _multiply("BTM,MH->BH"),
    "B and b are two logical axes": lambda: _multiply("BbM,MH->BbH"),
    "cannot be parsed; expected the logical axes": lambda: _multiply("BM,MH"),
    "vectorised over P": lambda: _multiply(outer_axes="P"),
}


@pytest.mark.parametrize("message", MISUSES)
def test_misuse_is_an_error_with_a_remedy(message):
    """Before anything is computed."""
    with pytest.raises(UserError, match=message):
        MISUSES[message]()
