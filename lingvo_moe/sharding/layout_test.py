"""Letters become the shardings that the papers print, and nothing is cut by accident."""

from __future__ import annotations

import numpy as np
import pytest

from lingvo_moe.errors import UserError
from lingvo_moe.lazy import tf
from lingvo_moe.sharding.layout import GSPMD_2D, NAMED_RULES, AxisRule, DeviceMesh, Layout
from lingvo_moe.testing import harness

ONE_AXIS, TWO_AXES = Layout.of(DeviceMesh((8,))), Layout.of(DeviceMesh((4, 2)))

# GShard Algorithm 2: the underscored letter of each tensor, and section 3.2's `wg = replicate(wg)`.
ALGORITHM_2 = {
    "GSM": "G",
    "me": "",
    "GSE": "G",
    "GSEC": "G",
    "EGCM": "E",
    "EMH": "E",
    "EGCH": "E",
    "EHM": "E",
    "GECM": "G",
}
# Its dense layers: data parallel, weights whole.
DENSE_1D = {
    "BTM": "B",
    "BTND": "B",
    "BNTL": "B",
    "BTH": "B",
    "BTV": "B",
    "MND": "",
    "NDM": "",
    "MH": "",
    "HM": "",
    "VM": "",
    "MV": "",
    "M": "",
}

# GSPMD table 1, "2D finalized".
TABLE_1 = {"MND": "x,y,_", "NDM": "y,_,x", "MH": "x,y", "HM": "y,x", "BSM": "x,_,y", "BSND": "x,_,y,_", "BSH": "x,_,y"}
# The attempts before it in the same table: weights lie alike in all three.
ATTEMPT_1 = {**TABLE_1, "BSM": "_,_,x", "BSND": "_,_,y,_", "BSH": "_,_,y"}
ATTEMPT_2 = {**TABLE_1, "BSM": "x,_,_"}
# GSPMD figure 8b, left to right (its B is our G, its order E, B our GECM before and EGCM after the AllToAll).
FIGURE_8B = {"GECM": "x,_,_,y", "EGCM": "x,_,_,y", "EMH": "x,_,y", "EGCH": "x,_,_,y", "EHM": "x,y,_"}
# By the same rules: gating, attention, vocabulary and vectors.
OTHERS_2D = {
    "GSM": "x,_,y",
    "GSE": "x,_,_",
    "GSEC": "x,_,_,_",
    "me": "_,_",
    "BNTL": "x,y,_,_",
    "VM": "y,x",
    "MV": "x,y",
    "BTV": "x,_,y",
    "M": "y",
    "RBTM": "_,x,_,y",
    "REMH": "_,x,_,y",
    "RMND": "_,x,y,_",
}


@pytest.mark.parametrize("letters, cut", {**ALGORITHM_2, **DENSE_1D}.items())
def test_one_axis_is_gshard_algorithm_2(logical_axes, cut):
    assert ONE_AXIS.axes(logical_axes) == tuple("x" if letter == cut else None for letter in logical_axes)


@pytest.mark.parametrize("letters, axes", {**TABLE_1, **FIGURE_8B, **OTHERS_2D}.items())
def test_two_axes_are_gspmd_table_1_and_figure_8b(logical_axes, axes):
    assert TWO_AXES.axes(logical_axes) == tuple(None if axis == "_" else axis for axis in axes.split(","))


@pytest.mark.parametrize(
    "name, table", [("gspmd_attempt_1", ATTEMPT_1), ("gspmd_attempt_2", ATTEMPT_2), ("gspmd", TABLE_1)]
)
def test_the_three_attempts_of_gspmd_table_1(name, table):
    layout = Layout.of(DeviceMesh((4, 2)), name)
    for logical_axes, axes in table.items():
        assert layout.axes(logical_axes) == tuple(None if axis == "_" else axis for axis in axes.split(",")), (
            logical_axes
        )


@pytest.mark.parametrize(
    "letters, cut", {**ALGORITHM_2, **DENSE_1D, "MH": "H", "HM": "H", "RMH": "H", "H": "H"}.items()
)
def test_a_sharded_update_cuts_dense_hidden_weights_and_nothing_else(logical_axes, cut):
    """Weight-update sharding: activations and experts lie where they lie in GShard's layout."""
    layout = Layout.of(DeviceMesh((8,)), "gshard_sharded_update")
    assert layout.axes(logical_axes) == tuple("x" if letter == cut else None for letter in logical_axes)


def test_names_choose_claims_and_auto_is_the_papers():
    for name, (axes, rules) in NAMED_RULES.items():
        assert Layout.of(DeviceMesh((2,) * axes), name).rules == rules
    assert (ONE_AXIS.rules, TWO_AXES.rules) == (NAMED_RULES["gshard"][1], NAMED_RULES["gspmd"][1])


@pytest.mark.parametrize(
    "mesh, name, said",
    [
        ((8,), "gshrad", "layout 'gshrad' is unknown. Did you mean gshard"),
        ((8,), "gspmd", "for a mesh of 2 axes, the mesh is 8"),
        ((4, 2), "gshard", "for a mesh of 1 axes, the mesh is 4x2; choose another with --set layout=auto"),
    ],
)
def test_a_name_that_does_not_fit_is_told_with_the_remedy(mesh, name, said):
    with pytest.raises(UserError, match=said):
        Layout.of(DeviceMesh(mesh), name)


def test_dims_mapping_and_num_shards_speak_of_the_same_axes():
    assert TWO_AXES.dims_mapping("EGCM") == (0, -1, -1, 1)
    assert [TWO_AXES.num_shards("EGCM", letter) for letter in "EGCM"] == [4, 1, 1, 2]
    assert ONE_AXIS.num_shards("BTM", "B") == 8 and ONE_AXIS.num_shards("MH", "H") == 1


def test_scalars_have_no_axes():
    assert TWO_AXES.axes("") == ()


def test_lower_case_letters_are_never_cut():
    assert TWO_AXES.axes("gsecmhbtlndvr") == (None,) * 13
    assert TWO_AXES.axes("bM") == (None, "y")


@pytest.mark.parametrize("letters", ["BQM", "q", "B M", "B1"])
def test_unknown_letters_are_errors(logical_axes):
    with pytest.raises(ValueError, match="is not one of GSECMHBTLNDVR"):
        ONE_AXIS.axes(logical_axes)


def test_a_letter_that_stands_twice_is_an_error():
    with pytest.raises(ValueError, match="'M' stands twice in 'BMM'"):
        ONE_AXIS.axes("BMM")


def test_two_letters_on_one_mesh_axis_are_an_error_that_names_both():
    layout = Layout(DeviceMesh((4, 2)), (AxisRule("B", ("x",)), AxisRule("E", ("x",))))
    with pytest.raises(ValueError, match="tensor EBM: letters B and E both claim mesh axis x"):
        layout.axes("EBM")
    assert layout.axes("EM") == ("x", None)


def test_leftovers_take_the_first_free_axis_that_the_mesh_has():
    layout = Layout(DeviceMesh((8,)), GSPMD_2D)
    assert layout.axes("MH") == ("x", None) and layout.axes("BTM") == ("x", None, None)


def test_annotate_refuses_letters_of_another_rank():
    with pytest.raises(ValueError, match=r"letters 'BTM' name 3 dimensions, the tensor has shape \(2, 3\)"):
        ONE_AXIS.annotate(tf.zeros((2, 3)), "BTM")


def test_annotate_on_one_device_returns_the_tensor_itself():
    with tf.Graph().as_default():
        tensor = tf.zeros((2, 3))
        assert Layout().annotate(tensor, "BM") is tensor


@pytest.mark.parametrize("mesh", ["2", "8", "2x2", "4x2"])
def test_annotated_values_are_unchanged(mesh):
    layout = Layout.of(DeviceMesh.parse(mesh))
    value = np.random.default_rng(0).normal(size=(8, 3, 4)).astype(np.float32)
    found = harness.run(lambda i: {"y": layout.annotate(i["x"], "BTM")}, {"x": value}, layout, {"x": "BTM", "y": "BTM"})
    np.testing.assert_array_equal(found["y"], value)


@pytest.mark.parametrize("text, shape", [("1", (1,)), ("8", (8,)), ("4x2", (4, 2)), ("32X64", (32, 64))])
def test_parse_reads_what_str_writes(text, shape):
    mesh = DeviceMesh.parse(text)
    assert mesh.shape == shape and mesh.axis_names == ("x", "y")[: len(shape)]
    assert DeviceMesh.parse(str(mesh)) == mesh


@pytest.mark.parametrize("text", ["", "x", "4x", "four", "4.5", "4*2", "0", "-8", "4x0", "2x2x2"])
def test_parse_refuses_anything_else_and_shows_what_is_right(text):
    with pytest.raises(UserError, match="4x2"):
        DeviceMesh.parse(text)


def test_devices_are_numbered_row_by_row():
    np.testing.assert_array_equal(DeviceMesh((2, 3)).devices, [[0, 1, 2], [3, 4, 5]])
    assert DeviceMesh((2, 3)).size == 6
