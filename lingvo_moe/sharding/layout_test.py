"""Logical axes map to the shardings that the papers print, and malformed layouts are errors."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from lingvo_moe.errors import UserError
from lingvo_moe.lazy import tf
from lingvo_moe.sharding.layout import (
    GSPMD_2D,
    LAYOUTS,
    AxisRule,
    DeviceMesh,
    Layout,
    register_layout,
    rules_text,
)
from lingvo_moe.testing import harness

ONE_AXIS, TWO_AXES = Layout.of(DeviceMesh((8,))), Layout.of(DeviceMesh((4, 2)))

# GShard Algorithm 2: the sharded logical axis of each tensor (underscored in the paper), and section 3.2's
# `wg = replicate(wg)`.
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
# Its dense layers: data parallel, weights replicated.
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
# The attempts before it in the same table; weights have the same sharding in all three.
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


@pytest.mark.parametrize("logical_axes, sharded", {**ALGORITHM_2, **DENSE_1D}.items())
def test_one_axis_is_gshard_algorithm_2(logical_axes, sharded):
    """The 1-D layout is the annotation of Algorithm 2."""
    assert ONE_AXIS.mesh_axes(logical_axes) == tuple("x" if axis == sharded else None for axis in logical_axes)


@pytest.mark.parametrize("logical_axes, axes", {**TABLE_1, **FIGURE_8B, **OTHERS_2D}.items())
def test_two_axes_are_gspmd_table_1_and_figure_8b(logical_axes, axes):
    """The 2-D layout is GSPMD's finalized one."""
    assert TWO_AXES.mesh_axes(logical_axes) == tuple(None if axis == "_" else axis for axis in axes.split(","))


@pytest.mark.parametrize(
    "name, table", [("gspmd_attempt_1", ATTEMPT_1), ("gspmd_attempt_2", ATTEMPT_2), ("gspmd", TABLE_1)]
)
def test_gspmd_table_1_attempts(name, table):
    """All three attempts of the table are available by name."""
    layout = Layout.of(DeviceMesh((4, 2)), name)
    for logical_axes, axes in table.items():
        assert layout.mesh_axes(logical_axes) == tuple(None if axis == "_" else axis for axis in axes.split(",")), (
            logical_axes
        )


@pytest.mark.parametrize(
    "logical_axes, sharded", {**ALGORITHM_2, **DENSE_1D, "MH": "H", "HM": "H", "RMH": "H", "H": "H"}.items()
)
def test_sharded_update_shards_dense_hidden_weights_only(logical_axes, sharded):
    """Weight-update sharding leaves activations and experts as GShard's layout has them."""
    layout = Layout.of(DeviceMesh((8,)), "gshard_sharded_update")
    assert layout.mesh_axes(logical_axes) == tuple("x" if axis == sharded else None for axis in logical_axes)


def test_layouts_are_selected_by_name():
    """`--set layout=NAME` selects the rules of that name; `auto` selects the papers' layout for the mesh."""
    for name in LAYOUTS.names():
        layout = LAYOUTS.get(name)
        assert Layout.of(DeviceMesh((2,) * layout.num_mesh_axes), name).rules == layout.rules
    assert (ONE_AXIS.rules, TWO_AXES.rules) == (LAYOUTS.get("gshard").rules, LAYOUTS.get("gspmd").rules)


@pytest.mark.parametrize(
    "mesh, name, message",
    [
        ((8,), "gshrad", "layout 'gshrad' is unknown. Did you mean gshard"),
        ((8,), "gspmd", "for a mesh of 2 axes, the mesh is 8"),
        ((4, 2), "gshard", "for a mesh of 1 axis, the mesh is 4x2; .* --set layout=NAME: gspmd, .* spatial_data"),
    ],
)
def test_unfit_layout_name_is_an_error_with_a_remedy(mesh, name, message):
    """A layout that is unknown, or is for another kind of mesh, never shards anything."""
    with pytest.raises(UserError, match=message):
        Layout.of(DeviceMesh(mesh), name)


def test_few_annotations_are_the_papers():
    """GSPMD table 1's seven tensors and figure 8b's five are annotated, stacked too; norms and routers are not."""
    layout = Layout.of(DeviceMesh((4, 2)), "gspmd_few")
    assert layout.rules == TWO_AXES.rules
    with tf.Graph().as_default():
        for logical_axes in (*TABLE_1, *FIGURE_8B, "RMH", "M", "GSE", "BNTL", "UBM"):
            letters = logical_axes.replace("S", "T") if logical_axes in TABLE_1 else logical_axes
            tensor = tf.zeros((8,) * len(letters))
            is_listed = logical_axes in {**TABLE_1, **FIGURE_8B, "RMH": "", "UBM": ""}
            annotated = layout.unreduced("y") if "U" in letters else layout
            assert (annotated.annotate(tensor, letters) is not tensor) == is_listed, logical_axes


EXPERTS_ONLY = (AxisRule("E", ("x",)),)


def test_registered_layout_is_selected_by_name():
    """A user's axis rules are as good as the repository's own."""
    with LAYOUTS.isolated():
        register_layout("experts_only", EXPERTS_ONLY, num_mesh_axes=1)
        layout = Layout.of(DeviceMesh((8,)), "experts_only")
        assert layout.mesh_axes("EMH") == ("x", None, None) and layout.mesh_axes("BTM") == (None,) * 3
    assert "experts_only" not in LAYOUTS.names()


def test_layout_may_be_registered_twice_but_not_replaced():
    """A file may be imported twice; two layouts of one name are an error."""
    with LAYOUTS.isolated():
        for _ in range(2):
            register_layout("experts_only", EXPERTS_ONLY, num_mesh_axes=1)
        with pytest.raises(UserError, match="layout 'experts_only' is already registered"):
            register_layout("experts_only", EXPERTS_ONLY, num_mesh_axes=2)
        with pytest.raises(UserError, match="layout 'gshard' is already registered; choose another name"):
            register_layout("gshard", EXPERTS_ONLY, num_mesh_axes=1)
        with pytest.raises(UserError, match="layout name 'auto' is reserved"):
            register_layout("auto", EXPERTS_ONLY, num_mesh_axes=1)


@pytest.mark.parametrize(
    "rules, num_mesh_axes, message",
    [
        (EXPERTS_ONLY, 0, "num_mesh_axes is 0; expected a number from 1"),
        ((AxisRule("e", ("x",)),), 1, "'mine', rule 0, AxisRule.*logical axis 'e' is not one of GSEC"),
        ((AxisRule("EQ", ("x",)),), 1, "logical axis 'Q' is not one of GSEC"),
        ((AxisRule("", ("x",)),), 1, "logical_axes must be a string of letters"),
        ((AxisRule("EE", ("x",)),), 1, "repeats a letter"),
        ((AxisRule("E", cast(Any, "x")),), 1, r"mesh_axes must be a tuple of mesh axes, for instance \(\"x\",\)"),
        ((AxisRule("E", ()),), 1, "mesh_axes must be a tuple of mesh axes"),
        ((AxisRule("E", ("x",)), AxisRule("M", ("y",))), 1, "rule 1, .*mesh axis 'y' is not one of .*mesh axes, x"),
        ((AxisRule("E", ("x", "y")),), 2, "several mesh_axes need fallback=True"),
        ((AxisRule("EM", ("x",)), AxisRule("MH", ("y",))), 2, "logical axis M is in rule 0 already"),
        (("E",), 1, "rule 0, E: expected an AxisRule"),
        ((AxisRule("BU", ("x",)),), 1, "U needs no rule: it is sharded along the mesh axis of the sum"),
    ],
)
def test_malformed_axis_rules_are_errors(rules, num_mesh_axes, message):
    """A mistake in a user's layout is reported when it is registered, with the layout and the rule."""
    with LAYOUTS.isolated(), pytest.raises(UserError, match=message):
        register_layout("mine", rules, num_mesh_axes)


def test_unknown_axis_of_an_annotated_tensor_is_an_error():
    """A misspelt tensor would be left to the compiler without a word."""
    with LAYOUTS.isolated(), pytest.raises(UserError, match="layout 'mine', annotated tensor 'BTQ': logical axis 'Q'"):
        register_layout("mine", EXPERTS_ONLY, num_mesh_axes=1, annotated=("BTM", "BTQ"))


@pytest.mark.parametrize("annotated", ["BTM", ("BTM", 3), ["BTM"]])
def test_annotated_tensors_are_a_tuple_of_texts(annotated):
    """A text would annotate every tensor whose logical axes are a part of it."""
    with LAYOUTS.isolated(), pytest.raises(UserError, match=r"annotated is .*; expected None, or a tuple"):
        register_layout("mine", EXPERTS_ONLY, num_mesh_axes=1, annotated=annotated)


def test_terms_of_a_partial_sum_have_their_mesh_axis_to_themselves():
    """What else the axis shards is complete in each term; the other axes shard as before."""
    assert TWO_AXES.unreduced("y").mesh_axes("UBTM") == ("y", "x", None, None)
    assert TWO_AXES.unreduced("x").mesh_axes("UMH") == ("x", None, "y")
    assert TWO_AXES.unreduced("x").mesh_axes("UBTM") == ("x", None, None, "y"), "where it does not fall back"
    assert ONE_AXIS.unreduced("x").mesh_axes("UBTM") == ("x", None, None, None)


def test_dims_mapping_and_num_shards_agree_with_mesh_axes():
    """The three forms of one answer."""
    assert TWO_AXES.dims_mapping("EGCM") == (0, -1, -1, 1)
    assert [TWO_AXES.num_shards("EGCM", axis) for axis in "EGCM"] == [4, 1, 1, 2]
    assert ONE_AXIS.num_shards("BTM", "B") == 8 and ONE_AXIS.num_shards("MH", "H") == 1


def test_scalar_has_no_mesh_axes():
    """A scalar is replicated."""
    assert TWO_AXES.mesh_axes("") == ()


def test_lower_case_axes_are_never_sharded():
    """A lower-case letter keeps a dimension replicated whatever the rules say."""
    assert TWO_AXES.mesh_axes("gsecmhbtlndvrpu") == (None,) * 15
    assert TWO_AXES.mesh_axes("bM") == (None, "y")


@pytest.mark.parametrize("logical_axes", ["BQM", "q", "B M", "B1"])
def test_unknown_logical_axis_is_an_error(logical_axes):
    """A misspelt axis is not silently replicated."""
    with pytest.raises(ValueError, match="is not one of GSECMHBTLNDVRPUXYZIO"):
        ONE_AXIS.mesh_axes(logical_axes)


def test_repeated_logical_axis_is_an_error():
    """A logical axis names one dimension of a tensor."""
    with pytest.raises(ValueError, match="logical axis 'M' is repeated in 'BMM'"):
        ONE_AXIS.mesh_axes("BMM")


def test_two_logical_axes_on_one_mesh_axis_are_an_error_that_names_both():
    """A mesh axis shards one dimension of a tensor; the rules are the user's, and so is the error."""
    layout = Layout(DeviceMesh((4, 2)), (AxisRule("B", ("x",)), AxisRule("E", ("x",))))
    with pytest.raises(
        UserError,
        match=r"tensor EBM: logical axes B and E are both assigned to mesh axis x.*fall back \(E~x\)",
    ):
        layout.mesh_axes("EBM")
    assert layout.mesh_axes("EM") == ("x", None)


def test_fallback_takes_the_first_free_axis_of_the_mesh():
    """A mesh axis that the mesh does not have is skipped."""
    layout = Layout(DeviceMesh((8,)), GSPMD_2D)
    assert layout.mesh_axes("MH") == ("x", None) and layout.mesh_axes("BTM") == ("x", None, None)


def test_annotate_checks_the_rank():
    """There is one logical axis for each dimension."""
    with pytest.raises(ValueError, match=r"logical axes 'BTM' name 3 dimensions, the tensor has shape \(2, 3\)"):
        ONE_AXIS.annotate(tf.zeros((2, 3)), "BTM")


def test_annotate_on_one_device_returns_the_tensor():
    """On one device a program has no sharding operators."""
    with tf.Graph().as_default():
        tensor = tf.zeros((2, 3))
        assert Layout().annotate(tensor, "BM") is tensor


@pytest.mark.parametrize("mesh", ["2", "8", "2x2", "4x2", "2x2x2"])
def test_annotated_values_are_unchanged(mesh):
    """An annotation changes where a tensor lives, not its value."""
    layout = Layout.of(DeviceMesh.parse(mesh))
    value = np.random.default_rng(0).normal(size=(8, 3, 4)).astype(np.float32)
    outputs = harness.run(
        lambda i: {"y": layout.annotate(i["x"], "BTM")}, {"x": value}, layout, {"x": "BTM", "y": "BTM"}
    )
    np.testing.assert_array_equal(outputs["y"], value)


AXIS_NAMES = {1: ("x",), 2: ("x", "y"), 3: ("l", "x", "y"), 5: ("l", "x", "y", "z", "z2")}


@pytest.mark.parametrize(
    "text, shape", [("1", (1,)), ("8", (8,)), ("4x2", (4, 2)), ("32X64", (32, 64)), ("4x16x4", (4, 16, 4))]
)
def test_parse_is_the_inverse_of_str(text, shape):
    """`--mesh=4x2` and the text of an experiment agree."""
    mesh = DeviceMesh.parse(text)
    assert mesh.shape == shape and mesh.axis_names == AXIS_NAMES[len(shape)]
    assert DeviceMesh.parse(str(mesh)) == mesh


@pytest.mark.parametrize("text", ["", "x", "4x", "four", "4.5", "4*2", "0", "-8", "4x0", "2x2x", "2xx2"])
def test_parse_rejects_anything_else_and_shows_the_format(text):
    """The message shows a correct value."""
    with pytest.raises(UserError, match="4x2"):
        DeviceMesh.parse(text)


def test_device_ids_are_in_row_major_order():
    """Mesh coordinates map to device ids in row-major order."""
    np.testing.assert_array_equal(DeviceMesh((2, 3)).devices, [[0, 1, 2], [3, 4, 5]])
    assert DeviceMesh((2, 3)).size == 6 and DeviceMesh((2**32, 2**32)).size == 2**64


@pytest.mark.parametrize(
    "arguments, message",
    [
        (((4, 2), "gspmd"), "the mesh is a tuple; expected a DeviceMesh"),
        ((DeviceMesh((8,)), None), "the name of the layout is None; expected a str"),
        ((DeviceMesh((8,)), ONE_AXIS), "the name of the layout is a Layout; expected a str"),
    ],
)
def test_a_layout_is_of_a_mesh_and_a_name(arguments, message):
    """What a mesh is needed for fails later, at another place."""
    with pytest.raises(UserError, match=message):
        Layout.of(*arguments)


@pytest.mark.parametrize("layout", [Layout(), ONE_AXIS])
def test_arrays_pass_an_annotation_outside_of_a_program(layout):
    """So a layer can be called with NumPy's arrays, to look at its values."""
    value = np.ones((8, 2), np.float32)
    assert layout.annotate(value, "BM") is value
    with pytest.raises(ValueError, match="name 3 dimensions"):
        layout.annotate(value, "BTM")


@pytest.mark.parametrize("shape", [8, "4x2", [4, 2], (4.0, 2), (), (4, 0)])
def test_a_mesh_is_a_tuple_of_sizes(shape):
    """A list would make a mesh that equals no other, and has no hash."""
    assert DeviceMesh((np.int64(4), 2)) == DeviceMesh((4, 2))
    with pytest.raises(UserError, match=r"give sizes >= 1, .*in Python \(8,\), \(4, 2\)\)"):
        DeviceMesh(shape)


def test_mesh_may_have_any_number_of_axes():
    """Layers of an axis more than the papers' have names too; names of one's own are kept."""
    mesh = DeviceMesh((2, 1, 2, 1, 2))
    assert mesh.axis_names == AXIS_NAMES[5] and mesh.devices.shape == (2, 1, 2, 1, 2) and mesh.axis_size("y") == 2
    assert DeviceMesh((2, 4), ("stage", "data")).axis_size("data") == 4


@pytest.mark.parametrize("names", [("l", "x"), ("l", "x", "x")])
def test_axis_names_that_do_not_fit_the_mesh_are_an_error(names):
    """A mesh axis without a name of its own could not be assigned."""
    with pytest.raises(UserError, match="give one name for each of the 3 sizes"):
        DeviceMesh((2, 2, 2), names)


def test_mesh_of_four_axes_needs_a_layout_by_name():
    """No rule is guessed for axes that no paper has."""
    mesh = DeviceMesh((2, 2, 2, 1))
    with pytest.raises(UserError, match="mesh 2x2x2x1 has 4 axes.*layout=NAME"):
        Layout.of(mesh)
    with LAYOUTS.isolated():
        register_layout("four", (AxisRule("PR", ("l",)), AxisRule("B", ("z",))), num_mesh_axes=4)
        assert Layout.of(mesh, "four").mesh_axes("PBTM") == ("l", "z", None, None)


# GSPMD section 5.2: weights are stored by stage and sharded along y, activations along x and y.
TABLE_4 = {"RMH": "l,_,y", "RHM": "l,y,_", "PMND": "l,_,y,_", "PBTM": "l,x,_,y", "PBTH": "l,x,_,y", "BTV": "x,_,y"}
# Figure 5's MoE layers inside of stages.
TABLE_4 |= {"PEGCM": "l,x,_,_,y", "PGECM": "l,x,_,_,y", "REMH": "l,x,_,y", "BTM": "x,_,y"}


@pytest.mark.parametrize("logical_axes, axes", TABLE_4.items())
def test_three_axes_are_gspmd_section_5_2(logical_axes, axes):
    """The default layout of a mesh of three axes."""
    layout = Layout.of(DeviceMesh((2, 2, 2)))
    assert layout.mesh_axes(logical_axes) == tuple(None if axis == "_" else axis for axis in axes.split(","))


def test_vectorized_layout_annotates_for_the_dimension_in_front():
    """Vectorisation keeps an annotation as it is, so it is written for the tensor with its stages."""
    layout = Layout.of(DeviceMesh((4, 2)), "pipeline_gshard")
    stage = layout.vectorized("P")
    assert stage.mesh_axes("BTM") == ("y", None, None) and stage.num_shards("BTM", "B") == 2
    value = np.random.default_rng(0).normal(size=(4, 8, 6)).astype(np.float32)

    def double(inputs: dict) -> dict:
        return {"y": tf.vectorized_map(lambda x: stage.annotate(x * 2.0, "BM"), inputs["x"])}

    executable = harness.compile_for(double, {"x": value}, layout, {"x": "PBM", "y": "PBM"})
    np.testing.assert_array_equal(executable({"x": value})["y"], value * 2.0)
    assert not harness.collectives(executable) and "f32[1,4,6]" in executable.hlo()


def test_layout_within_stages_leaves_their_axis_to_them():
    """GSPMD section 5.3: the batch before and after a pipeline is on the axis of its stages; other layouts stay."""
    layout = Layout.of(DeviceMesh((8,)), "pipeline_data")
    assert layout.mesh_axes("BTM") == ("x", None, None) and layout.mesh_axes("RMH") == ("x", None, None)
    inside = layout.within_stages()
    assert inside.mesh_axes("BTM") == (None, None, None) and inside.mesh_axes("PBTM") == ("x", None, None, None)
    for name, shape in (("pipeline", (8,)), ("pipeline_gshard", (4, 2)), ("gspmd", (4, 2))):
        other = Layout.of(DeviceMesh(shape), name)
        assert other.within_stages() == other


@pytest.mark.parametrize("name", ["gshard", "gshard_sharded_update", "gspmd", "pipeline_data", "pipeline_gspmd"])
def test_a_layout_may_be_written_where_its_name_is_expected(name):
    """The text of its rules, which `plan --search=layout` prints, is the layout."""
    mesh = DeviceMesh((2,) * LAYOUTS.get(name).num_mesh_axes)
    layout = Layout.of(mesh, name)
    assert Layout.of(mesh, rules_text(layout.rules)) == layout
    assert rules_text(GSPMD_2D) == "BGE:x,HNV:y,M~y/x"


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("BGE:x,HNV", "'HNV' is not an axis rule; write letters, ':' and a mesh axis"),
        ("BGE:x,HNV:z", "mesh axis 'z' is not one of this layout's mesh axes, x, y"),
        ("BGE:x,HB:y", "logical axis B is in rule 0 already"),
        ("BGE:x/y", "several mesh_axes need fallback=True"),
        ("BQE:x", "logical axis 'Q' is not one of"),
    ],
)
def test_malformed_texts_of_layouts_are_refused(text, pattern):
    """The error names the text and the rule."""
    with pytest.raises(UserError, match=pattern):
        Layout.of(DeviceMesh((4, 2)), text)
