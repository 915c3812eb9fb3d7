"""What needs no TensorFlow does not pay for it; what needs it gets a quiet one that leaves GPUs alone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lingvo_moe import lazy


def run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["train", "--help"],
        ["list"],
        ["show", "Quickstart"],
        ["train", "--model=Quikstart"],
        ["plan", "Quikstart"],
    ],
)
def test_what_computes_nothing_imports_neither_tensorflow_nor_jax(arguments):
    code = (
        f"import sys; from lingvo_moe.cli import main; main.main(['lingvo_moe', *{arguments}]); "
        "print('LOADED', {'tensorflow', 'jax', 'orbax'} & set(sys.modules))"
    )
    assert run(code).stdout.rstrip().endswith("LOADED set()")


def test_tensorflow_is_silent_and_sees_no_gpu():
    """Its C++ messages would break progress bars; a GPU's memory is for the programs."""
    found = run("from lingvo_moe.lazy import tf; print(tf.constant(1).numpy(), tf.config.get_visible_devices('GPU'))")
    assert (found.stdout, found.stderr) == ("1 []\n", "")


def test_a_failing_import_shows_what_was_held_back():
    """Otherwise a broken installation would be a riddle."""
    broken = run(
        "import os, sys\nfrom lingvo_moe import lazy\nclass Finder:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'no_such_library': os.write(2, b'the reason'); raise ImportError('broken')\n"
        "sys.meta_path.insert(0, Finder())\nlazy._Lazy('no_such_library').anything"
    )
    assert "the reason" in broken.stderr and "ImportError: broken" in broken.stderr


def test_an_absent_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_thing"):
        lazy.tf.no_such_thing  # noqa: B018
