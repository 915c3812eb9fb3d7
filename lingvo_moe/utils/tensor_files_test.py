"""Protects safetensors files: a full disk is an error of one line, and leaves the old file."""

from __future__ import annotations

import resource

import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from lingvo_moe.errors import UserError
from lingvo_moe.utils import tensor_files


def test_a_full_disk_is_an_error_that_leaves_the_old_file(tmp_path):
    """safetensors has an error of its own for it."""
    file = tmp_path / "a.safetensors"
    tensor_files.save("--output=a", file, {"x": np.arange(3)}, {"key": "value"})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        with pytest.raises(UserError, match="--output=a: cannot be written .*; free disk space, or name another file"):
            tensor_files.save("--output=a", file, {"x": np.arange(3000)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(safetensors_numpy.load_file(file)["x"]) == [0, 1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_a_directory_that_is_gone_is_the_same_error(tmp_path):
    """It was there when the command started, hours ago."""
    with pytest.raises(UserError, match="--output=a: cannot be written .*No such file or directory"):
        tensor_files.save("--output=a", tmp_path / "gone" / "a.safetensors", {"x": np.arange(3)}, {})
