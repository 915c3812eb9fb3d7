"""A program has the sharding of every input and output, and a saved program loads as it was."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
import sys
import zipfile

import numpy as np
import pytest

from lingvo_moe.errors import UserError
from lingvo_moe.lazy import tf
from lingvo_moe.program import Argument, Program, lower
from lingvo_moe.sharding.layout import DeviceMesh, Layout, Spec
from lingvo_moe.testing import harness

LAYOUT = Layout.of(DeviceMesh((4, 2)))
INPUTS = {"state": {"w": np.ones((8, 4), np.float32), "step": np.int32(1)}, "batch": {"x": np.ones((4, 8), np.float32)}}
SPECS = {
    "state": {"w": Spec((8, 4), "float32", "MH"), "step": Spec((), "int32", "")},
    "batch": {"x": Spec((4, 8), "float32", "BM")},
}


def step(inputs: dict) -> dict:
    state, x = inputs["state"], LAYOUT.annotate(inputs["batch"]["x"], "BM")
    return {
        "state": {"w": state["w"] + 1.0, "step": state["step"] + 1},
        "y": tf.matmul(x, state["w"]),
        "metrics": {"total": tf.reduce_sum(x)},
    }


@pytest.fixture(scope="module")
def program() -> Program:
    return lower("step", step, SPECS, {"y": "BH"}, LAYOUT, donated=("state",))


@pytest.fixture
def bundle(program, tmp_path) -> str:
    path = str(tmp_path / "step.program")
    program.save(path)
    return path


def test_inputs_and_outputs_have_shape_dtype_and_sharding(program):
    """They are sorted by path; an output with an input's path has its sharding, a scalar is replicated."""
    assert program.inputs == (
        Argument("batch/x", (4, 8), "float32", (0, 1)),
        Argument("state/step", (), "int32", ()),
        Argument("state/w", (8, 4), "float32", (0, 1)),
    )
    assert program.outputs == (
        Argument("metrics/total", (), "float32", ()),
        Argument("state/step", (), "int32", ()),
        Argument("state/w", (8, 4), "float32", (0, 1)),
        Argument("y", (4, 4), "float32", (0, 1)),
    )
    assert program.donated == ("state/step", "state/w")
    assert (program.name, program.mesh) == ("step", DeviceMesh((4, 2)))


def test_output_without_logical_axes_is_an_error():
    """No output is replicated by omission."""
    with pytest.raises(ValueError, match=r"program step: output y has shape \(4, 4\), but its logical axes are ''"):
        lower("step", step, SPECS, {}, LAYOUT)


def test_output_with_logical_axes_of_another_rank_is_an_error():
    """There is one logical axis for each dimension."""
    with pytest.raises(ValueError, match="output y"):
        lower("step", step, SPECS, {"y": "B"}, LAYOUT)


@pytest.mark.parametrize(
    "x, message",
    [
        (Spec((4, 8), "float32", "B"), r"input batch/x has shape \(4, 8\), but its logical axes are 'B'"),
        (np.ones((4, 8), np.float32), r"input batch/x is a float32 \[4, 8\]; expected a Spec"),
    ],
)
def test_inputs_are_specs_with_an_axis_for_each_dimension(x, message):
    """With an axis too few, the last dimension would be unsharded."""
    with pytest.raises(ValueError, match=f"^program step: {message}"):
        lower("step", step, {**SPECS, "batch": {"x": x}}, {"y": "BH"}, LAYOUT)


@pytest.mark.parametrize("dtype", ["float", np.float32, tf.float32])
def test_a_dtype_is_that_of_tensorflow(dtype):
    """NumPy's `float` is float64; a program is saved with the name alone."""
    specs = {"x": Spec((2,), dtype, "m")}
    program = lower("same", dict, specs, {}, LAYOUT, donated=("x",))
    assert program.inputs[0].dtype == "float32" and program.donated == ("x",)


def test_sizes_of_numpy_are_saved(tmp_path):
    """As products of shapes are; JSON has no int64."""
    size = np.prod((2, 2))
    layout = Layout.of(DeviceMesh((size,)), "gshard")
    program = lower("same", dict, {"x": Spec((size,), "float32", "B")}, {}, layout)
    program.save(str(tmp_path / "program"))
    assert Program.load(str(tmp_path / "program")) == program


def test_the_gradient_of_a_gather_is_a_tensor():
    """TensorFlow returns its rows and their numbers, which are no output of a program."""

    def gradient(inputs):
        with tf.GradientTape() as tape:
            tape.watch(inputs["w"])
            loss = tf.reduce_sum(tf.gather(inputs["w"], inputs["ids"]))
        return {"w": tape.gradient(loss, inputs["w"])}

    specs = {"w": Spec((4, 2), "float32", "me"), "ids": Spec((3,), "int32", "s")}
    program = lower("gather", gradient, specs, {}, LAYOUT)
    values = {"w": np.zeros((4, 2), np.float32), "ids": np.int32([1, 1, 3])}
    found = harness.engine(LAYOUT).compile(program)(values)
    np.testing.assert_array_equal(found["w"], [[0, 0], [2, 2], [0, 0], [1, 1]])


@pytest.mark.parametrize(
    "returned, message",
    [
        (3.0, "the result of the function is a float; expected a dict"),
        ({"theta": {"w": None}}, r"output theta/w is None \(a gradient is, .* tape does not watch it\); expected a"),
        ({"loss": 3.0}, "output loss is of type float; expected a tensor"),
    ],
)
def test_a_function_returns_a_tree_of_tensors(returned, message):
    """A tape's gradient is None where the loss does not depend on a weight, which TensorFlow's errors do not say."""
    with pytest.raises(UserError, match=f"^program step: {message}"):
        lower("step", lambda inputs: returned, SPECS, {}, LAYOUT)


def test_an_output_of_unknown_shape_is_an_error():
    """XLA would pad it."""
    with pytest.raises(UserError, match=r"output positive has shape \(None,\); programs have static shapes"):
        lower(
            "step",
            lambda inputs: {"positive": inputs["x"][inputs["x"] > 0]},
            {"x": Spec((4,), "float32", "B")},
            {},
            LAYOUT,
        )


@pytest.mark.parametrize("make", [tf.constant, tf.Variable])
def test_tensors_from_outside_of_a_function_are_an_error(make):
    """TensorFlow makes them hidden arguments, which no engine passes: MLIR's verifier fails when it is compiled."""
    with tf.init_scope():
        outside = make(np.ones(4, np.float32))
    with pytest.raises(UserError, match="^program sum: the function uses .* made outside of it .*; make it an input"):
        lower("sum", lambda inputs: {"x": inputs["x"] + outside}, {"x": Spec((4,), "float32", "B")}, {}, LAYOUT)


@pytest.mark.parametrize("donated", ["state", ("sate",)])
def test_donated_names_are_those_of_inputs(donated):
    """A name that is no input's would donate nothing, and the memory of two states would be needed."""
    with pytest.raises(UserError, match="^program step: donated is .*; expected a tuple of names among batch, state"):
        lower("step", step, SPECS, {"y": "BH"}, LAYOUT, donated=donated)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda state: {"step": state["step"]},
            r"returned no state/w, which its donated input declares .float32 \[8, 4\]",
        ),
        (lambda state: {**state, "w": tf.cast(state["w"], tf.bfloat16)}, r"returned state/w as bfloat16 \[8, 4\]; its"),
        (lambda state: {**state, "w": state["w"][0]}, r"returned state/w as float32 \[4\]; its donated input declares"),
        (lambda state: {**state, "n": state["step"]}, "returned state/n, which its donated input does not declare"),
    ],
)
def test_donated_inputs_are_returned(change, message):
    """A state without one of them would be saved, and could not be restored."""
    with pytest.raises(UserError, match=f"^program step {message}"):
        lower("step", lambda inputs: {"state": change(inputs["state"])}, SPECS, {"state/w": "H"}, LAYOUT, ("state",))


def test_no_weight_exists_while_lowering():
    """A terabyte of weights is lowered from its shape alone."""
    weights = {"w": Spec((2**19, 2**19), "float32", "MH"), "x": Spec((1, 2**19), "float32", "bM")}
    huge = lower("huge", lambda inputs: {"y": tf.matmul(inputs["x"], inputs["w"])}, weights, {"y": "bH"}, LAYOUT)
    assert len(huge.module) < 10_000


def test_annotations_are_checked_against_the_number_of_devices():
    """Sixteen partitions are an error on eight devices and valid on sixteen."""
    from lingvo_moe.sharding import spmd

    x = {"x": Spec((16, 2), "float32", "bM")}

    def sharded(inputs: dict) -> dict:
        return {"x": spmd.split(inputs["x"], 0, 16)}

    assert lower("sharded", sharded, x, {}, Layout.of(DeviceMesh((16,)))).mesh.size == 16
    with pytest.raises(ValueError, match="there are 8 devices"):
        lower("sharded", sharded, x, {}, Layout.of(DeviceMesh((8,))))


def test_equal_programs_are_equal_files(program, bundle, tmp_path, monkeypatch):
    """The time of day does not matter."""
    monkeypatch.setattr("time.time", lambda: 1e9)
    program.save(str(tmp_path / "again.program"))
    assert (tmp_path / "again.program").read_bytes() == pathlib.Path(bundle).read_bytes()


def test_load_is_the_inverse_of_save(program, bundle):
    """`export` and the cache of programs rely on it."""
    assert Program.load(bundle) == program


def test_a_programs_threshold_for_products_in_slices_is_saved(program, bundle):
    """Bundles from before there was one leave it to the compiler."""
    dataclasses.replace(program, windowed_einsum_mib=64).save(bundle)
    assert Program.load(bundle).windowed_einsum_mib == 64
    rewrite(bundle, windowed_einsum_mib=None)
    assert Program.load(bundle) == program


@pytest.mark.slow
def test_loaded_program_runs_without_tensorflow(bundle):
    """JAX and NumPy are enough; in a process of its own."""
    code = f"""
import sys
import numpy as np
from lingvo_moe.engines.pjrt import Engine
from lingvo_moe.program import Program
program = Program.load({bundle!r})
inputs = {{"state": {{"w": np.ones((8, 4), np.float32), "step": np.int32(1)}},
          "batch": {{"x": np.ones((4, 8), np.float32)}}}}
outputs = Engine(8, platform="cpu").compile(program)(inputs)
assert (np.asarray(outputs["y"]) == 8).all() and (np.asarray(outputs["state"]["w"]) == 2).all()
assert not any(name.startswith("tensorflow") for name in sys.modules), "TensorFlow was imported"
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)


def test_saving_is_atomic(program, bundle, tmp_path, monkeypatch):
    """A write that fails leaves the old program unchanged."""
    before = pathlib.Path(bundle).read_bytes()

    def full_disk(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr("os.replace", full_disk)
    with pytest.raises(OSError, match="no space"):
        program.save(bundle)
    assert pathlib.Path(bundle).read_bytes() == before


def test_missing_program_is_an_error_with_a_remedy(tmp_path):
    """The message names the command that writes a program."""
    with pytest.raises(UserError, match="nowhere.program: no such program; write it with `python -m lingvo_moe exp"):
        Program.load(str(tmp_path / "nowhere.program"))


def test_directory_is_an_error(tmp_path):
    """A directory is not a bundle."""
    with pytest.raises(UserError, match="cannot be read"):
        Program.load(str(tmp_path))


def test_truncated_program_is_an_error(bundle):
    """A copy that was interrupted is recognised."""
    content = pathlib.Path(bundle).read_bytes()
    for size in (0, 1, len(content) // 2, len(content) - 1):
        pathlib.Path(bundle).write_bytes(content[:size])
        with pytest.raises(UserError, match="not a program bundle, or a corrupt one"):
            Program.load(bundle)


def test_corrupt_byte_is_an_error_or_harmless(program, bundle):
    """Whichever byte is corrupt: the result is a one-line error or the same program, never another program."""
    content = pathlib.Path(bundle).read_bytes()
    for position in range(len(content)):
        for flipped in (0x01, 0xFF):
            changed = bytes([content[position] ^ flipped])
            pathlib.Path(bundle).write_bytes(content[:position] + changed + content[position + 1 :])
            try:
                assert Program.load(bundle) == program
            except UserError as error:
                assert bundle in str(error)


def rewrite(bundle: str, **changes):
    """Replaces entries of the header; None removes one."""
    with zipfile.ZipFile(bundle) as archive:
        header, module = json.loads(archive.read("program.json")), archive.read("module.bin")
    header = {name: value for name, value in (header | changes).items() if value is not None}
    with zipfile.ZipFile(bundle, "w") as archive:
        archive.writestr("program.json", json.dumps(header))
        archive.writestr("module.bin", module)


@pytest.mark.parametrize(
    "changes",
    [
        {"inputs": None},
        {"inputs": 3},
        {"inputs": [{"path": "x"}]},
        {"mesh": None},
        {"mesh": 8},
        {"mesh": [0]},
        {"axis_names": ["x", "x"]},
        {"donated": 1},
        {"windowed_einsum_mib": "many"},
        {"windowed_einsum_mib": 2.7},
        {"format": None},
    ],
)
def test_malformed_header_is_an_error(bundle, changes):
    """A file that another program wrote is not loaded by accident."""
    rewrite(bundle, **changes)
    with pytest.raises(UserError, match=f"{bundle}: not a program bundle, or a corrupt one"):
        Program.load(bundle)


def test_other_format_version_is_an_error(bundle):
    """The message names both versions."""
    rewrite(bundle, format=99)
    with pytest.raises(
        UserError, match=r"or a corrupt one \(program format 99; this version reads 2\); export it again"
    ):
        Program.load(bundle)


def test_other_zip_file_is_an_error(tmp_path):
    """A zip file is not necessarily a bundle."""
    path = str(tmp_path / "other.zip")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "not a program")
    with pytest.raises(UserError, match="not a program bundle"):
        Program.load(path)
