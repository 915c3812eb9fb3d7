"""TensorFlow is imported only where it is needed, and silently and without GPUs once the command line has started."""

from __future__ import annotations

import pytest

from lingvo_moe import lazy
from lingvo_moe.testing.processes import run_code


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
def test_commands_that_compute_nothing_import_neither_tensorflow_nor_jax(arguments):
    """Help, lists and mistyped names are answered at once."""
    code = (
        f"import sys; from lingvo_moe.cli import main; main.main(['lingvo_moe', *{arguments}]); "
        "print('LOADED', {'tensorflow', 'jax', 'orbax'} & set(sys.modules))"
    )
    assert run_code(code).stdout.rstrip().endswith("LOADED set()")


@pytest.mark.slow
def test_tensorflow_of_the_command_line_is_silent_and_sees_no_gpu():
    """Its C++ messages would break progress bars; a GPU's memory is for the programs."""
    process = run_code(
        "from lingvo_moe.cli import process_setup; process_setup.set_up_process()\n"
        "from lingvo_moe.lazy import tf; print(tf.constant(1).numpy(), tf.config.get_visible_devices('GPU'))"
    )
    assert (process.stdout, process.stderr) == ("1 []\n", "")


def test_failing_import_shows_its_output():
    """A broken installation explains itself."""
    process = run_code(
        "import os, sys\nfrom lingvo_moe import lazy\nclass Finder:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'no_such_library': os.write(2, b'the reason'); raise ImportError('broken')\n"
        "sys.meta_path.insert(0, Finder())\n"
        "module = lazy.LazyModule('no_such_library')\nmodule.configure_import(lazy.deferred_stderr)\nmodule.anything",
        succeeds=False,
    )
    assert "the reason" in process.stderr and "ImportError: broken" in process.stderr


def test_absent_attribute_is_an_attribute_error():
    """A lazy module behaves like the module."""
    with pytest.raises(AttributeError, match="no_such_thing"):
        lazy.tf.no_such_thing  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
