"""Files of other programs are read safely, and what is wrong with them is said by name."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from lingvo_moe.errors import UserError
from lingvo_moe.importing import model_directory

NAME = "--input=model"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def directory(tmp_path):
    """Two files and their index."""
    save_file({"a": np.arange(6, dtype=np.float16).reshape(2, 3)}, tmp_path / "one.safetensors")
    save_file({"b": np.ones(4, np.float32)}, tmp_path / "two.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    return tmp_path


def write_index(directory, places):
    (directory / INDEX).write_text(json.dumps({"weight_map": places}))


def test_tensors_of_several_files_are_float32(directory):
    with model_directory.tensors(directory, NAME) as tensors:
        assert tensors.shapes == {"a": (2, 3), "b": (4,)}
        found = tensors.read("a", (2, 3))
        assert found.dtype == np.float32 and found.tolist() == [[0, 1, 2], [3, 4, 5]]
        with pytest.raises(UserError, match=r"--input=model: b has the shape \[4\]; by config.json, \[5\] is expected"):
            tensors.read("b", (5,))
        with pytest.raises(UserError, match="--input=model: there is no tensor c, which config.json requires"):
            tensors.read("c", (5,))


def test_bfloat16_is_read(tmp_path):
    """Bit for bit."""
    save_file({"a": np.array([1.0, -3.5], ml_dtypes.bfloat16)}, tmp_path / "model.safetensors")
    with model_directory.tensors(tmp_path, NAME) as tensors:
        assert tensors.read("a", (2,)).tolist() == [1.0, -3.5]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, np.bool_])
def test_quantized_weights_are_refused(tmp_path, dtype):
    """Their integers would be taken for weights."""
    save_file({"a": np.ones(3, dtype)}, tmp_path / "model.safetensors")
    message = "--input=model: a is [A-Z0-9]+; expected one of F32, F16, BF16. Import the model from before it was quant"
    with model_directory.tensors(tmp_path, NAME) as tensors, pytest.raises(UserError, match=message):
        tensors.read("a", (3,))


def test_float8_is_refused(tmp_path):
    """NumPy has no such dtype; safetensors would raise AttributeError."""
    save_file({"a": np.ones(3, np.uint8)}, tmp_path / "model.safetensors")
    file = tmp_path / "model.safetensors"
    content = file.read_bytes().replace(b'"U8"', b'"F8_E4M3"')
    header = content[8:-3].rstrip()
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[-3:])
    with model_directory.tensors(tmp_path, NAME) as tensors, pytest.raises(UserError, match="a is F8_E4M3; expected"):
        tensors.read("a", (3,))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused(tmp_path, value):
    """A model with them would be refused only when it is used."""
    save_file({"a": np.array([1, value], np.float16)}, tmp_path / "model.safetensors")
    message = "--input=model: a has values that are not finite; copy its file again"
    with model_directory.tensors(tmp_path, NAME) as tensors, pytest.raises(UserError, match=message):
        tensors.read("a", (2,))


def test_one_file_needs_no_index(tmp_path):
    save_file({"a": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    with model_directory.tensors(tmp_path, NAME) as tensors:
        assert tensors.shapes == {"a": (3,)}


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda d: (d / INDEX).unlink(), "there is neither model.safetensors nor model.safetensors.index.json"),
        (lambda d: (d / INDEX).write_text("{"), "index.json is not JSON .* copy it again"),
        (lambda d: (d / INDEX).write_text("[]"), "index.json is a list; expected an object"),
        (lambda d: (d / INDEX).write_text("{}"), "has no weight_map; copy it again"),
        (
            lambda d: write_index(d, {"a": "../one.safetensors"}),
            "'../one.safetensors' is refused: it has the component",
        ),
        (lambda d: write_index(d, {"a": "/etc/passwd"}), "'/etc/passwd' is refused: it is absolute"),
        (lambda d: write_index(d, {"a": 3}), "3 is not a path; expected a string"),
        (lambda d: write_index(d, {"a": "two.safetensors"}), "has a in two.safetensors, where it is not"),
        (lambda d: (d / "two.safetensors").unlink(), "cannot read two.safetensors .No such file .*; copy it, too"),
        (
            lambda d: (d / "two.safetensors").write_bytes((d / "two.safetensors").read_bytes()[:-3]),
            "two.safetensors is not a complete safetensors file .* copy it again",
        ),
    ],
)
def test_a_damaged_directory_is_an_error(directory, spoil, message):
    """Nothing outside of the directory is read."""
    spoil(directory)
    with pytest.raises(UserError, match=message), model_directory.tensors(directory, NAME):
        pass


def test_pickles_are_not_read(tmp_path):
    """Reading one may run code; the error has the command that converts it."""
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    message = r"pickles, .* may run code .*from_pretrained\('.*'\).save_pretrained\('"
    with pytest.raises(UserError, match=message), model_directory.tensors(tmp_path, NAME):
        pass
