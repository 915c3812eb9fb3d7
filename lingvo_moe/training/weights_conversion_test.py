"""Safetensors files of weights: exact round trips; unfit and corrupt files are refused."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pathlib
import re
import tempfile

import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st
from safetensors import numpy as safetensors_numpy

from lingvo_moe import tree
from lingvo_moe.errors import UserError
from lingvo_moe.sharding.layout import Spec
from lingvo_moe.testing.checkpoints import (
    SPECS,
    files_up_to,
    flip,
    restore_theta,
    save,
    state_of,
    theta_of,
)
from lingvo_moe.testing.harness import BFLOAT16_ROUNDING
from lingvo_moe.training import checkpoint_average, logdir_lock, weights_conversion
from lingvo_moe.training.checkpoint import Checkpoints
from lingvo_moe.training.checkpoint_reader import WEIGHTS

THETA = tree.flatten(SPECS["theta"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Checkpoints:
    """Steps 4, 8 and 12 of the small state."""
    return save(tmp_path_factory.mktemp("log"), 4, 8, 12)


@pytest.fixture(scope="module")
def weights_file(trained, tmp_path_factory) -> pathlib.Path:
    """The weights of step 8."""
    path = tmp_path_factory.mktemp("file") / "weights.safetensors"
    weights_conversion.to_safetensors(trained, 8, path)
    return path


def test_converted_weights_keep_what_read_their_texts(tmp_path):
    """From a training's checkpoint to a file and back: translate refuses other tokenizers for these, too."""
    with contextlib.closing(Checkpoints(tmp_path / "log", keep=1)) as checkpoints:
        checkpoints.save("tiny", state_of(4), {"next": 4, "readers": ["x", "y"]})
    file = tmp_path / "a.safetensors"
    weights_conversion.to_safetensors(checkpoints, 4, file)
    weights_conversion.from_safetensors(file, "tiny", SPECS["theta"], tmp_path / "back")
    with weights_conversion.as_logdir(file, "tiny", SPECS["theta"]) as logdir:
        found = [Checkpoints(each).tokenizer_hashes(4) for each in (tmp_path / "log", tmp_path / "back", logdir)]
    assert found == [["x", "y"]] * 3


def test_safetensors_round_trip(tmp_path):
    """Bit for bit: NaN payloads, negative zero, denormals. The file is the same each time; any program can read it."""
    theta = theta_of(8)
    odd = np.array([0x7FC12345, 0x80000000, 1, 0xFF800000], np.uint32).view(np.float32)
    theta["embedding"] = np.concatenate([odd, theta["embedding"].ravel()[4:]]).reshape(16, 8)
    checkpoints = Checkpoints(tmp_path / "odd", keep=1)
    checkpoints.save_weights(8, "tiny", tree.unflatten(theta), "a test")
    checkpoints.close()
    for name in ("a.safetensors", "b.safetensors"):
        weights_conversion.to_safetensors(checkpoints, 8, tmp_path / name)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert {
        path: value.tobytes() for path, value in safetensors_numpy.load_file(tmp_path / "a.safetensors").items()
    } == {path: value.tobytes() for path, value in theta.items()}
    assert (
        weights_conversion.from_safetensors(tmp_path / "a.safetensors", "tiny", SPECS["theta"], tmp_path / "back") == 8
    )
    step, found = restore_theta(tmp_path / "back")
    assert step == 8
    for path, value in tree.flatten(found).items():
        assert np.asarray(value).tobytes() == theta[path].tobytes(), path
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors", "back", "odd"]


def test_temporary_copies_of_killed_processes_are_removed(weights_file, tmp_path, monkeypatch):
    """Each is as large as the weights in float32."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed = tmp_path / "lingvo_moe-killed"
    killed.mkdir()
    (killed / "lock").touch()
    os.utime(killed, (0, 0))
    with weights_conversion.as_logdir(weights_file, "tiny", SPECS["theta"]) as logdir:
        assert Checkpoints(logdir).latest(WEIGHTS) == 8
    assert not any(tmp_path.iterdir())


def test_a_full_disk_is_an_error_that_leaves_no_file(trained, tmp_path):
    """safetensors has an error of its own for it."""
    with (
        files_up_to(100),
        pytest.raises(UserError, match="--output=.*a.safetensors: cannot be written .* free disk space"),
    ):
        weights_conversion.to_safetensors(trained, 8, tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())


def test_file_of_half_the_bits(trained, weights_file, tmp_path):
    """bfloat16 halves the file; back in float32, each weight is within one rounding of the original."""
    file = tmp_path / "half.safetensors"
    weights_conversion.to_safetensors(trained, 8, file, "bfloat16")
    original = safetensors_numpy.load_file(weights_file)
    stored = safetensors_numpy.load_file(file)
    assert {path: 2 * stored[path].nbytes for path in stored} == {path: original[path].nbytes for path in original}
    weights_conversion.from_safetensors(file, "tiny", SPECS["theta"], tmp_path / "back")
    for path, value in tree.flatten(restore_theta(tmp_path / "back")[1]).items():
        assert np.asarray(value).dtype == np.float32
        np.testing.assert_allclose(value, original[path], rtol=BFLOAT16_ROUNDING, atol=0)


def test_file_of_a_quarter_of_the_bits(trained, weights_file, tmp_path):
    """int8 quarters matrices but for a scale of each row; back, each is within half a scale; vectors are exact."""
    file = tmp_path / "quarter.safetensors"
    weights_conversion.to_safetensors(trained, 8, file, "int8")
    original = safetensors_numpy.load_file(weights_file)
    stored = safetensors_numpy.load_file(file)
    assert stored["embedding"].dtype == np.int8 and stored["embedding.scale"].shape == (16,)
    weights_conversion.from_safetensors(file, "tiny", SPECS["theta"], tmp_path / "back")
    for path, value in tree.flatten(restore_theta(tmp_path / "back")[1]).items():
        if original[path].ndim < 2:
            np.testing.assert_array_equal(value, original[path])
        else:
            half = np.abs(original[path]).max(axis=-1, keepdims=True) / 254
            assert np.all(np.abs(value - original[path]) <= half * (1 + 1e-5)), path


def test_int8_file_without_its_scales_is_refused(trained, tmp_path):
    """The scale of the weights is unknown."""
    file = tmp_path / "quarter.safetensors"
    weights_conversion.to_safetensors(trained, 8, file, "int8")
    with safetensors.safe_open(file, "numpy") as opened:
        metadata = opened.metadata()
    stored = {path: value for path, value in safetensors_numpy.load_file(file).items() if path != "embedding.scale"}
    safetensors_numpy.save_file(stored, file, metadata)
    with pytest.raises(UserError, match=r"embedding is int8 \[16, 8\] there, float32 \[16, 8\] here"):
        weights_conversion.from_safetensors(file, "tiny", SPECS["theta"], tmp_path / "new")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused(weights_file, tmp_path, value, caplog):
    """A model with them would translate each line into the same token, and nothing would say why.

    A file of floating-point numbers can have them; it is written with a warning.
    """
    file, logdir = tmp_path / "weights.safetensors", tmp_path / "log"
    with safetensors.safe_open(weights_file, "numpy") as opened:
        metadata = opened.metadata()
    stored = safetensors_numpy.load_file(weights_file)
    stored["embedding"][3, 4] = value
    safetensors_numpy.save_file(stored, file, metadata)
    message = "weights.safetensors: embedding has values that are not finite; use another file"
    with pytest.raises(UserError, match=message), weights_conversion.as_logdir(file, "tiny", SPECS["theta"]):
        pass
    checkpoints = Checkpoints(logdir, keep=9)
    for step, theta in ((4, stored), (8, safetensors_numpy.load_file(weights_file))):
        checkpoints.save_weights(step, "tiny", tree.unflatten(theta), "a test")
    checkpoints.close()
    with pytest.raises(UserError, match="checkpoints/4: embedding has values that are not finite; choose another step"):
        checkpoint_average.of_steps(Checkpoints(logdir), [4, 8], tmp_path / "average")
    assert not (tmp_path / "average").exists()
    message = r"log/checkpoints/4: embedding has values that are not finite; .* choose another step"
    with pytest.raises(UserError, match=message):
        weights_conversion.to_safetensors(Checkpoints(logdir), 4, tmp_path / "new.safetensors", "int8")
    assert not (tmp_path / "new.safetensors").exists()
    for dtype in ("float32", "bfloat16"):
        caplog.clear()
        weights_conversion.to_safetensors(Checkpoints(logdir), 4, tmp_path / f"{dtype}.safetensors", dtype)
        assert re.search(message, caplog.text)


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (
            {"embedding": Spec((16, 9), "float32", "VM")},
            r"embedding is float32 \[16, 8\] there, float32 \[16, 9\] here",
        ),
        (
            {"embedding": Spec((16, 8), "bfloat16", "VM")},
            r"embedding is float32 \[16, 8\] there, bfloat16 \[16, 8\] here",
        ),
        ({"bias": Spec((8,), "float32", "M")}, r"bias is absent there, float32 \[8\] here"),
        ({"expert": {"outer": Spec((8,), "float32", "M")}}, r"expert/inner is float32 \[4, 8, 16\] there, absent here"),
    ],
)
def test_safetensors_of_another_model_is_refused(weights_file, tmp_path, change, pattern):
    """The error names the first tensor that differs; no log directory is created."""
    with pytest.raises(UserError, match=f"does not hold the weights of other: {pattern}. Pass that --model"):
        weights_conversion.from_safetensors(weights_file, "other", SPECS["theta"] | change, tmp_path / "new")
    assert not list(tmp_path.iterdir())


def foreign(path: pathlib.Path, metadata: dict[str, str] | None):
    safetensors_numpy.save_file(
        {name: np.zeros(spec.shape, spec.dtype) for name, spec in THETA.items()}, path, metadata
    )


def written(**changes) -> dict[str, str]:
    """Returns the metadata of a file of weights with changed fields, and without those that are `...`."""
    fields = {"format": 1, "model": "tiny", "step": 4, **changes}
    return {"lingvo_moe": json.dumps({name: value for name, value in fields.items() if value is not ...})}


@pytest.mark.parametrize(
    ("metadata", "pattern"),
    [
        (None, "lacks format, model or step"),
        ({"format": "pt"}, "lacks format, model or step"),
        ({"lingvo_moe": "{"}, "lacks format, model or step"),
        ({"lingvo_moe": "3"}, "lacks format, model or step"),
        (written(model=...), "lacks format, model or step"),
        (written(format=2), "format 2; this program knows 1"),
        (written(model=None), "model is None; expected the registered name"),
        (written(step=-4), "step is -4"),
        (written(step="../4"), "step is '../4'"),
        (written(readers=5), "readers are 5; expected a list"),
    ],
)
def test_safetensors_of_another_program_is_refused(tmp_path, metadata, pattern):
    """By the metadata, before any tensor is read."""
    path = tmp_path / "foreign.safetensors"
    foreign(path, metadata)
    with pytest.raises(UserError, match=pattern):
        weights_conversion.from_safetensors(path, "tiny", SPECS["theta"], tmp_path / "new")
    assert not (tmp_path / "new").exists()


@given(data=st.data())
def test_malformed_safetensors(weights_file, tmp_path_factory, data):
    """Truncated anywhere, with a flipped bit in the header's length, or of any bytes: an error names the file."""
    content = weights_file.read_bytes()
    kind = data.draw(st.sampled_from(["truncated", "flipped", "made up"]))
    path, logdir = weights_file.with_name("malformed.safetensors"), weights_file.with_name("new")
    if kind == "truncated":
        path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    elif kind == "flipped":
        path.write_bytes(content)
        flip(path, data.draw(st.integers(0, 63)))  # the length of the header
    else:
        path.write_bytes(data.draw(st.binary(max_size=64)))
    with pytest.raises(UserError, match="malformed.safetensors: not a complete safetensors file"):
        weights_conversion.from_safetensors(path, "tiny", SPECS["theta"], logdir)
    assert not logdir.exists()


def test_a_write_that_failed_can_be_repeated(weights_file, tmp_path):
    """A full disk leaves a directory of Orbax, which is no checkpoint."""
    left = tmp_path / "checkpoints" / "8.orbax-checkpoint-tmp"
    left.mkdir(parents=True)
    assert weights_conversion.from_safetensors(weights_file, "tiny", SPECS["theta"], tmp_path) == 8
    assert Checkpoints(tmp_path).latest() == 8 and not left.exists()


def test_nothing_is_written_where_a_training_runs(trained, weights_file, tmp_path, monkeypatch):
    """It has no checkpoint yet; each would delete those of the other."""
    monkeypatch.setattr(logdir_lock, "_ENDING_SECONDS", 0)
    with logdir_lock.locked(tmp_path):
        with pytest.raises(UserError, match=f"--logdir={tmp_path}: another process trains there"):
            weights_conversion.from_safetensors(weights_file, "tiny", SPECS["theta"], tmp_path)
        with pytest.raises(UserError, match=f"--output={tmp_path}: another process trains there"):
            checkpoint_average.of_steps(trained, trained.steps()[-2:], tmp_path)
    assert not Checkpoints(tmp_path).steps()


def test_unfit_paths_are_refused_first(trained, weights_file, tmp_path):
    """Before anything is read or written."""
    for name, pattern in (
        ("weights.bin", "ends with .safetensors"),
        ("nowhere/a.safetensors", "there is no directory"),
    ):
        with pytest.raises(UserError, match=pattern):
            weights_conversion.to_safetensors(trained, 8, tmp_path / name)
    content = weights_file.read_bytes()
    with pytest.raises(UserError, match=f"--output={weights_file} exists already; name a new file, or delete"):
        weights_conversion.to_safetensors(trained, 4, weights_file)
    assert weights_file.read_bytes() == content
    with pytest.raises(UserError, match="no such file"):
        weights_conversion.from_safetensors(tmp_path / "a.safetensors", "tiny", SPECS["theta"], tmp_path / "new")
    with pytest.raises(UserError, match="already has checkpoints"):
        weights_conversion.from_safetensors(weights_file, "tiny", SPECS["theta"], trained.directory.parent)
    with pytest.raises(UserError, match="is a file; expected a directory"):
        weights_conversion.from_safetensors(weights_file, "tiny", SPECS["theta"], weights_file)
    with pytest.raises(UserError, match="x/y: .*weights.safetensors is a file; expected a directory"):
        weights_conversion.from_safetensors(weights_file, "tiny", SPECS["theta"], weights_file / "x" / "y")
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_written_to_is_refused_first(trained, weights_file, tmp_path, monkeypatch):
    """Before arrays are read; nothing is left, and the error is not that of a checkpoint."""

    def refuse(dir):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(dir))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    monkeypatch.setattr(weights_conversion.Reader, "read", None)
    monkeypatch.setattr(safetensors, "safe_open", None)
    pattern = (
        r"=.*/new/log: nothing can be written there \(Read-only file system\). Mount .* for writing, or pass another "
    )
    with pytest.raises(UserError, match=f"^--output{pattern}--output.$"):
        checkpoint_average.of_steps(trained, [4, 8], tmp_path / "new" / "log")
    with pytest.raises(UserError, match=f"^--logdir{pattern}--logdir.$"):
        weights_conversion.from_safetensors(weights_file, "tiny", SPECS["theta"], tmp_path / "new" / "log")
    assert not any(tmp_path.iterdir())
