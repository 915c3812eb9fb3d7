"""Export writes a program that can be loaded."""

from __future__ import annotations

import pytest

from lingvo_moe.cli import main
from lingvo_moe.program import Program
from lingvo_moe.testing import experiments as tiny

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_once")]


def test_export_writes_a_program_that_loads(tmp_path, capsys):
    """The bundle can be loaded, and its size is printed; `program_test` runs one without TensorFlow."""
    path = tmp_path / "decode.zip"
    assert main.main(["lingvo_moe", "export", *tiny.settings(), "--program=decode", f"--output={path}"]) == 0
    program = Program.load(str(path))
    assert program.name == "decode" and program.mesh.size == 2
    size = path.stat().st_size
    assert size < 2**20 and f" for 2 devices, {size / 2**10:.1f} KiB\n" in capsys.readouterr().err
    assert {a.path for a in program.outputs} == {"ids", "scores", "lengths"}


@pytest.mark.parametrize(
    "model, settings, program, shape",
    [
        (
            "conformer.Small",
            ("model.num_layers=1", "input.source_length=40", "input.batch_size=2"),
            "transcribe",
            (2, 10),
        ),
        ("unet.Small", ("model.num_layers=2", "input.size=8,8,8"), "segment", (2, 8, 8, 8)),
    ],
)
def test_models_without_beam_search_export_their_inference(tmp_path, model, settings, program, shape):
    """Before, none of the programs that export wrote had a class for each position or voxel."""
    path, flags = tmp_path / "bundle.zip", [f"--set={setting}" for setting in settings]
    command = ["lingvo_moe", "export", f"--model={model}", *flags, f"--output={path}"]
    assert main.main([*command, f"--program={program}"]) == 0
    (output,) = Program.load(str(path)).outputs
    assert (output.path, output.shape) == ("classes", shape)


def test_a_program_that_no_engine_could_load_is_not_written(tmp_path, capsys):
    """Before, its first user was told that devices do not divide a weight."""
    path = tmp_path / "init.zip"
    settings = [*tiny.settings(), "--set=layout=BGE:x,H~x", "--set=model.hidden_dim=31"]
    assert main.main(["lingvo_moe", "export", *settings, "--program=init", f"--output={path}"]) == 2
    assert "has a dimension of 31, which mesh axis x of 2 devices does not divide" in capsys.readouterr().err
    assert not path.exists()


def test_a_program_of_other_models_is_an_error(tmp_path, capsys):
    assert (
        main.main(["lingvo_moe", "export", "--model=unet.Small", "--program=decode", f"--output={tmp_path / 'x'}"]) == 2
    )
    expected = "--program=decode: unet.Small segments volumes; its programs are init, train, evaluate, segment."
    assert expected in capsys.readouterr().err
