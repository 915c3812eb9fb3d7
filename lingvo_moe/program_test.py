"""A program knows the place of all it takes and gives, and survives being written down."""

from __future__ import annotations

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


def test_inputs_and_outputs_have_shape_dtype_and_place(program):
    """In order of their paths; an output with an input's path lives where that does, a scalar everywhere."""
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


def test_an_output_without_letters_is_an_error():
    with pytest.raises(ValueError, match=r"program step: output y has shape \(4, 4\), and no letters"):
        lower("step", step, SPECS, {}, LAYOUT)


def test_an_output_with_letters_of_another_rank_is_an_error():
    with pytest.raises(ValueError, match="output y"):
        lower("step", step, SPECS, {"y": "B"}, LAYOUT)


def test_no_weight_exists_while_lowering():
    """A terabyte of weights is lowered from its shape alone."""
    weights = {"w": Spec((2**19, 2**19), "float32", "MH"), "x": Spec((1, 2**19), "float32", "bM")}
    huge = lower("huge", lambda inputs: {"y": tf.matmul(inputs["x"], inputs["w"])}, weights, {"y": "bH"}, LAYOUT)
    assert len(huge.module) < 10_000


def test_the_number_of_devices_holds_inside_a_program():
    """The same annotation is an error of eight devices and none of sixteen."""
    from lingvo_moe.sharding import spmd

    x = {"x": Spec((16, 2), "float32", "bM")}

    def cut(inputs: dict) -> dict:
        return {"x": spmd.split(inputs["x"], 0, 16)}

    assert lower("cut", cut, x, {}, Layout.of(DeviceMesh((16,)))).mesh.size == 16
    with pytest.raises(ValueError, match="there are 8 devices"):
        lower("cut", cut, x, {}, Layout.of(DeviceMesh((8,))))


def test_equal_programs_are_equal_files(program, bundle, tmp_path, monkeypatch):
    """Whatever the time of day is."""
    monkeypatch.setattr("time.time", lambda: 1e9)
    program.save(str(tmp_path / "again.program"))
    assert (tmp_path / "again.program").read_bytes() == pathlib.Path(bundle).read_bytes()


def test_load_is_the_inverse_of_save(program, bundle):
    assert Program.load(bundle) == program


def test_a_loaded_program_runs_without_tensorflow(bundle):
    """In a process of its own: jax and numpy are enough."""
    code = f"""
import sys
import numpy as np
from lingvo_moe.engines.pjrt import Engine
from lingvo_moe.program import Program
program = Program.load({bundle!r})
inputs = {{"state": {{"w": np.ones((8, 4), np.float32), "step": np.int32(1)}},
          "batch": {{"x": np.ones((4, 8), np.float32)}}}}
outputs = Engine(8, platform="cpu").load(program)(inputs)
assert (np.asarray(outputs["y"]) == 8).all() and (np.asarray(outputs["state"]["w"]) == 2).all()
assert not any(name.startswith("tensorflow") for name in sys.modules), "TensorFlow was imported"
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)


def test_saving_over_a_program_is_all_or_nothing(program, bundle, tmp_path, monkeypatch):
    """A write that fails leaves the old program as it was, and never half of the new one."""
    before = pathlib.Path(bundle).read_bytes()

    def full_disk(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr("lingvo_moe.program.os.replace", full_disk)
    with pytest.raises(OSError, match="no space"):
        program.save(bundle)
    assert pathlib.Path(bundle).read_bytes() == before


def test_a_missing_program_is_an_error_that_says_how_to_write_one(tmp_path):
    with pytest.raises(UserError, match="nowhere.program: no such program; write it with `python -m lingvo_moe exp"):
        Program.load(str(tmp_path / "nowhere.program"))


def test_a_directory_is_an_error(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        Program.load(str(tmp_path))


def test_a_truncated_program_is_an_error(bundle):
    content = pathlib.Path(bundle).read_bytes()
    for kept in (0, 1, len(content) // 2, len(content) - 1):
        pathlib.Path(bundle).write_bytes(content[:kept])
        with pytest.raises(UserError, match="not a program bundle, or a damaged one"):
            Program.load(bundle)


def test_a_damaged_program_is_an_error_or_harmless(program, bundle):
    """Any byte may have rotted: the answer is one line, never a traceback, and never another program."""
    content = pathlib.Path(bundle).read_bytes()
    for position in range(len(content)):
        changed = bytes([content[position] ^ 0xFF])
        pathlib.Path(bundle).write_bytes(content[:position] + changed + content[position + 1 :])
        try:
            assert Program.load(bundle) == program
        except UserError as error:
            assert bundle in str(error)


def rewritten(bundle: str, **changes):
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
        {"donated": 1},
        {"format": None},
    ],
)
def test_a_header_that_lacks_something_is_an_error(bundle, changes):
    rewritten(bundle, **changes)
    with pytest.raises(UserError, match="not a program bundle, or a damaged one"):
        Program.load(bundle)


def test_another_format_is_an_error_that_says_which(bundle):
    rewritten(bundle, format=99)
    with pytest.raises(UserError, match="program format 99, this version reads 2; export it again"):
        Program.load(bundle)


def test_another_archive_is_an_error(tmp_path):
    path = str(tmp_path / "other.zip")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "not a program")
    with pytest.raises(UserError, match="not a program bundle"):
        Program.load(path)
