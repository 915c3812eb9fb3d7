"""Without a model, a checkpoint's arrays come back as they were saved, on whatever mesh; one that cannot is named."""

from __future__ import annotations

import datetime
import re

import jax
import numpy as np
import pytest

from lingvo_moe import tree
from lingvo_moe.sharding.layout import DeviceMesh
from lingvo_moe.testing.checkpoints import SPECS, assert_equal, save, state_of
from lingvo_moe.training.checkpoint import Checkpoints
from lingvo_moe.training.checkpoint_manifest import CorruptCheckpoint
from lingvo_moe.training.checkpoint_reader import WEIGHTS, Reader


def test_arrays_come_back_one_by_one(tmp_path):
    """Those that were cut over four devices are whole."""
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
    assert set(reader.specs(WEIGHTS)) == {path for path in expected if path.startswith("theta/")}
    assert reader.problems(finite=True) == []
    age = datetime.datetime.now(datetime.timezone.utc) - reader.date()
    assert datetime.timedelta() <= age < datetime.timedelta(hours=1)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("rest/d/*", r"rest cannot be read \(.*what it says of its arrays is damaged\)"),
        ("theta/_METADATA", r"theta cannot be read \("),
        ("theta/ocdbt.process_0/d/*", r"theta/expert/inner cannot be read \("),
        ("meta/metadata", r"meta cannot be read \("),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, file, said):
    """By item, and by array where the item's own account of its arrays is whole."""
    save(tmp_path, 8)
    reader = Reader(tmp_path / "checkpoints" / "8")
    max(reader.directory.glob(file), key=lambda path: path.stat().st_size).unlink()
    found = reader.problems()
    assert len(found) == 1 and re.match(said, found[0]), found
    assert reader.problems(WEIGHTS) == ([] if file.startswith("rest") else found)


@pytest.mark.parametrize("content", ["", "{}", "null", "{", '{"commit_timestamp_nsecs": 1e300}'])
def test_a_date_that_cannot_be_read_is_named(tmp_path, content):
    """Of a damaged file Orbax gives what it could read, or an answer that is no number."""
    save(tmp_path, 8)
    reader = Reader(tmp_path / "checkpoints" / "8")
    (reader.directory / "_CHECKPOINT_METADATA").write_text(content)
    with pytest.raises(CorruptCheckpoint, match="the step's metadata cannot be read"):
        reader.date()


def test_weights_must_be_those_that_meta_speaks_of(tmp_path):
    """Half a tree is no checkpoint."""
    save(tmp_path, 8)
    reader = Reader(tmp_path / "checkpoints" / "8")
    reader.meta["weights"]["bias"] = [4]
    reader.meta["weights"]["embedding"] = [16, 9]
    assert reader.problems() == ["theta/embedding is [16, 8] instead of [16, 9]", "theta/bias is absent instead of [4]"]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_are_counted(tmp_path, value):
    state = state_of(8)
    state["theta"]["embedding"] = jax.numpy.array(state["theta"]["embedding"]).at[2, 3:5].set(value)
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save("tiny", state, None)
    checkpoints.close()
    reader = Reader(checkpoints.path(8))
    assert reader.problems() == [] and reader.problems(finite=True) == [
        "theta/embedding has 2 values that are not finite"
    ]
