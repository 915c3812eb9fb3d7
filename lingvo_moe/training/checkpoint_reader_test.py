"""Reading a checkpoint without a model: arrays are equal to what was saved, and one that cannot be read is named."""

from __future__ import annotations

import datetime
import errno
import json
import os
import re

import jax
import numpy as np
import pytest
from orbax import checkpoint as orbax

from lingvo_moe import tree
from lingvo_moe.errors import UserError
from lingvo_moe.sharding.layout import DeviceMesh
from lingvo_moe.testing.checkpoints import SPECS, assert_equal, save, state_of
from lingvo_moe.training.checkpoint import Checkpoints
from lingvo_moe.training.checkpoint_errors import CorruptCheckpoint
from lingvo_moe.training.checkpoint_manifest import MANIFEST
from lingvo_moe.training.checkpoint_reader import WEIGHTS, Reader


def test_arrays_are_read_one_by_one(tmp_path):
    """Those that were sharded over four devices are complete."""
    state = state_of(8, SPECS, DeviceMesh((4,)))
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save("tiny", state, {"next": 3})
    checkpoints.close()
    reader = Reader(checkpoints.path(8))
    assert reader.meta["model"] == "tiny" and reader.meta["data_state"] == {"next": 3}
    expected = tree.flatten(SPECS)
    assert {path: (spec.shape, spec.dtype) for path, spec in reader.specs().items()} == {
        path: (spec.shape, spec.dtype) for path, spec in expected.items()
    }
    assert_equal({path: reader.read(path) for path in reader.specs()}, tree.flatten(state))
    for path in ("theta/expert/iner", "theta/expert", "theta/expert/inner/w"):
        with pytest.raises(UserError, match=f"8 has no {path}. Did you mean theta/expert/inner"):
            reader.read(path)
    assert set(reader.specs(WEIGHTS)) == {path for path in expected if path.startswith("theta/")}
    assert reader.problems(finite=True) == []
    age = datetime.datetime.now(datetime.UTC) - reader.date()
    assert datetime.timedelta() <= age < datetime.timedelta(hours=1)


@pytest.mark.parametrize(
    ("file", "pattern"),
    [
        ("rest/d/*", r"rest cannot be read \(.*its array metadata is corrupt\)"),
        ("theta/_METADATA", r"theta cannot be read \("),
        ("theta/ocdbt.process_0/d/*", r"theta/expert/inner cannot be read \("),
        ("meta/metadata", r"meta cannot be read \("),
    ],
)
def test_item_or_array_that_cannot_be_read_is_named(tmp_path, file, pattern):
    """The array, if the metadata of its item can be read."""
    save(tmp_path, 8)
    reader = Reader(tmp_path / "checkpoints" / "8")
    max(reader.directory.glob(file), key=lambda path: path.stat().st_size).unlink()
    found = reader.problems()
    assert len(found) == 1 and re.match(pattern, found[0]), found
    assert reader.problems(WEIGHTS) == ([] if file.startswith("rest") else found)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.EMFILE, errno.ENOTCONN, errno.ESTALE])
def test_what_cannot_be_read_for_now_is_not_corrupt(tmp_path, monkeypatch, number):
    """Without a manifest, the arrays are read at a start: nothing is set aside because a file server has restarted."""

    def fail(*_, **__):
        raise OSError(number, os.strerror(number), "_METADATA")

    save(tmp_path, 8)
    (tmp_path / "checkpoints" / "8" / MANIFEST).unlink()
    monkeypatch.setattr(orbax.PyTreeCheckpointHandler, "metadata", fail)
    with pytest.raises(UserError, match=rf"checkpoints/8: .*{os.strerror(number)}.*it is not changed") as raised:
        Checkpoints(tmp_path).latest()
    assert not isinstance(raised.value, CorruptCheckpoint)


@pytest.mark.parametrize(
    "change",
    [
        {"weights": {"a": "b"}},
        {"weights": {"a": None}},
        {"weights": {"a": [True]}},
        {"weights": {"a": [-1]}},
        {"weights": []},
        {"model": 3},
        {"data_state": [1]},
        {"origin": 1},
    ],
)
def test_meta_of_another_kind_is_corrupt(tmp_path, change):
    """Whatever uses it would end with a traceback; without a manifest nothing else notices."""
    (tmp_path / "meta").mkdir()
    valid = {"model": "tiny", "weights": {"a": [2, 0], "b": []}, "data_state": None}
    for meta in (valid, valid | {"origin": "a test", "data_state": {"next": 3}}):
        (tmp_path / "meta" / "metadata").write_text(json.dumps(meta))
        assert Reader(tmp_path).meta == meta
    without = {name: value for name, value in valid.items() if name not in change}
    for meta in (valid | change, without) if without != valid else (valid | change,):
        (tmp_path / "meta" / "metadata").write_text(json.dumps(meta))
        with pytest.raises(CorruptCheckpoint, match="meta lacks an entry, or has one of another kind"):
            _ = Reader(tmp_path).meta


@pytest.mark.parametrize("content", ["", "{}", "null", "{", '{"commit_timestamp_nsecs": 1e300}'])
def test_corrupt_date(tmp_path, content):
    """Orbax returns what it could read of the file, which may be no number."""
    save(tmp_path, 8)
    reader = Reader(tmp_path / "checkpoints" / "8")
    (reader.directory / "_CHECKPOINT_METADATA").write_text(content)
    with pytest.raises(CorruptCheckpoint, match="the step's metadata cannot be read"):
        reader.date()


def test_weights_must_be_those_of_meta(tmp_path):
    """A checkpoint that lacks a weight, or has it in another shape, is not valid."""
    save(tmp_path, 8)
    reader = Reader(tmp_path / "checkpoints" / "8")
    reader.meta["weights"]["bias"] = [4]
    reader.meta["weights"]["embedding"] = [16, 9]
    assert reader.problems() == ["theta/embedding is [16, 8] instead of [16, 9]", "theta/bias is absent instead of [4]"]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_are_counted(tmp_path, value):
    """Only if asked for."""
    state = state_of(8)
    state["theta"]["embedding"] = jax.numpy.array(state["theta"]["embedding"]).at[2, 3:5].set(value)
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save("tiny", state, None)
    checkpoints.close()
    reader = Reader(checkpoints.path(8))
    assert reader.problems() == [] and reader.problems(finite=True) == [
        "theta/embedding has 2 values that are not finite"
    ]
