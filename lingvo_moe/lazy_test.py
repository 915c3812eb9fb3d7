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
def test_tensorflow_of_the_command_line_is_silent_sees_no_gpu_and_imports_keras_when_used():
    """Its C++ messages would break progress bars; a GPU's memory is for the programs; Keras takes most of a second."""
    process = run_code(
        "from lingvo_moe.cli import process_setup; process_setup.set_up_process()\nimport sys\n"
        "from lingvo_moe.lazy import tf; print(tf.constant(1).numpy(), tf.config.get_visible_devices('GPU'))\n"
        "print({'keras', 'matplotlib'} & set(sys.modules), tf.keras.losses.MeanSquaredError()([1.0], [3.0]).numpy())"
    )
    assert (process.stdout, process.stderr) == ("1 []\nset() 4.0\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("first, second", [("tf", "tf_text"), ("tf_text", "tf")])
def test_tensorflow_and_its_texts_are_imported_in_either_order(first, second):
    """TensorFlow Text has layers of Keras, which the import of TensorFlow leaves out."""
    process = run_code(
        "from lingvo_moe.cli import process_setup; process_setup.set_up_process()\n"
        f"from lingvo_moe.lazy import tf, tf_text; {first}.__name__, {second}.__name__\n"
        "print(tf_text.WhitespaceTokenizer().tokenize(tf.constant('a b')).numpy())"
    )
    assert (process.stdout, process.stderr) == ("[b'a' b'b']\n", "")


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
