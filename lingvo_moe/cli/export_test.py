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
