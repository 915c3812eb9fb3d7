"""Changed arrays are found by whoever reads them; neither saving nor starting reads them to find out."""

from __future__ import annotations

import errno
import os
import pathlib
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orbax import checkpoint as orbax

from lingvo_moe import tree
from lingvo_moe.errors import UserError
from lingvo_moe.testing.checkpoints import (
    ONE,
    SPECS,
    assert_equal,
    bytes_read,
    flip,
    largest,
    make_sparse,
    names,
    restore,
    save,
    shardings,
    state_of,
    truncate,
    values_of,
)
from lingvo_moe.training import checkpoint_manifest, checkpoint_tools
from lingvo_moe.training.checkpoint import Checkpoints
from lingvo_moe.training.checkpoint_errors import is_corruption, is_read_failure

ARRAYS = "theta/ocdbt.process_0/d/*"


@pytest.fixture(scope="module", autouse=True)
def only_sizes_of_data():
    """The manifest has no hash of a data file, however small: as if each were larger than those that are hashed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_manifest, "_SMALL_BYTES", -1)
        yield


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> pathlib.Path:
    """A log directory with steps 4 and 8; every test leaves it as it was."""
    logdir = tmp_path_factory.mktemp("log")
    save(logdir, 4, 8)
    return logdir


@pytest.fixture
def flipped(saved, tmp_path) -> pathlib.Path:
    """A copy of `saved` with a flipped bit in the weights of step 8, which nothing but reading them finds."""
    shutil.copytree(saved, tmp_path / "log")
    flip(largest(tmp_path / "log" / "checkpoints" / "8", ARRAYS))
    return tmp_path / "log"


@pytest.mark.slow
@settings(max_examples=100)
@given(data=st.data())
def test_no_flipped_bit_becomes_another_value(saved, data):
    """Of any bit of any file of an item: either the state is bit for bit what was saved, or the step before is used."""
    step = saved / "checkpoints" / "8"
    files = sorted(path for item in ("theta", "rest") for path in (step / item).rglob("*") if path.is_file())
    path = data.draw(st.sampled_from(files))
    before = path.read_bytes()
    try:
        flip(path, data.draw(st.integers(0, len(before) * 8 - 1)))
        found = restore(saved)
    finally:
        path.write_bytes(before)
    assert_equal(found.state, state_of(found.step))
    assert found.step in (4, 8) and found.data_state == {"next": found.step}


def test_flipped_weight_is_found_at_restore(flipped, caplog):
    """`latest` does not read it; `restore` names it and uses the previous checkpoint, and `save` sets it aside."""
    checkpoints = Checkpoints(flipped, keep=2)
    assert checkpoints.latest() == 8
    found = checkpoints.restore("tiny", SPECS, shardings(SPECS, ONE))
    assert (found.step, found.data_state) == (4, {"next": 4})
    assert_equal(found.state, state_of(4))
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("lingvo_moe")]
    assert len(messages) == 2 and messages[0].startswith(f"{flipped}/checkpoints/8 is corrupt: "), messages
    assert "expert.inner" in messages[0] and messages[1] == f"{flipped}/checkpoints/4 is used instead."
    assert checkpoints.latest() == 4 and names(flipped) == {"4", "8"}
    checkpoints.save("tiny", state_of(8), {"next": 8})
    checkpoints.close()
    assert names(flipped) == {"4", "8", "8.corrupt"} and restore(flipped).step == 8


def test_flipped_seed_is_found_at_a_start(saved, tmp_path):
    """Before compiling, training compares the seed, the first array that it reads; the step before is used."""
    shutil.copytree(saved, tmp_path / "log")
    for file in (tmp_path / "log" / "checkpoints" / "8" / "rest").rglob("d/*"):
        file.write_bytes(bytes(len(file.read_bytes())))
    checkpoints = Checkpoints(tmp_path / "log")
    assert checkpoints.latest() == 8
    assert checkpoints.newest_compatible_state("tiny", SPECS) == (4, values_of(4)["seed"][1])
    assert checkpoints.restore("tiny", SPECS, shardings(SPECS, ONE)).step == 4


@pytest.mark.parametrize("corrupt", [truncate, pathlib.Path.unlink])
def test_file_lost_between_start_and_restore(saved, tmp_path, corrupt):
    """A program is compiled in between, which takes minutes."""
    shutil.copytree(saved, tmp_path / "log")
    checkpoints = Checkpoints(tmp_path / "log")
    assert checkpoints.latest() == 8
    corrupt(largest(checkpoints.path(8), ARRAYS))
    assert checkpoints.restore("tiny", SPECS, shardings(SPECS, ONE)).step == 4


def test_flipped_weight_is_found_by_inference(flipped):
    """It falls back as training does; a step that was asked for is refused instead."""
    checkpoints, targets = Checkpoints(flipped), shardings(SPECS, ONE)["theta"]
    with pytest.raises(UserError, match="checkpoints/8 is corrupt: .*expert.inner.*Choose another step"):
        checkpoints.restore_theta("tiny", SPECS["theta"], targets, step=8)
    step, theta = checkpoints.restore_theta("tiny", SPECS["theta"], targets)
    assert step == 4
    assert_equal(theta, state_of(4)["theta"])


def test_flipped_optimizer_state_does_not_concern_inference(saved, tmp_path):
    """It reads the weights only, which are valid."""
    shutil.copytree(saved, tmp_path / "log")
    flip(largest(tmp_path / "log" / "checkpoints" / "8" / "rest" / "d", "*"))
    targets = shardings(SPECS, ONE)
    assert Checkpoints(tmp_path / "log").restore_theta("tiny", SPECS["theta"], targets["theta"])[0] == 8
    assert restore(tmp_path / "log").step == 4


def test_flipped_weight_is_found_while_it_is_loaded(flipped):
    """Arrays that are read when they are indexed: the previous state replaces what was already loaded."""
    loaded = {}

    def load(state: dict):
        loaded.update({path: leaf[(slice(None),) * len(leaf.shape)] for path, leaf in tree.flatten(state).items()})

    found = Checkpoints(flipped).restore("tiny", SPECS, None, load)
    assert found.step == 4
    assert_equal(loaded, tree.flatten(values_of(4)))


def test_all_checkpoints_corrupt_at_restore(flipped):
    """The error is that of a start that finds no valid one."""
    flip(largest(flipped / "checkpoints" / "4", ARRAYS))
    with pytest.raises(UserError, match="no checkpoint is valid; corrupt: 4, 8. Restore one from a copy"):
        restore(flipped)


def test_too_little_memory_is_not_corruption(saved, monkeypatch):
    """No valid checkpoint is given up because this machine cannot hold it."""

    def fail(*arguments, **options):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 68719476736 bytes.")

    monkeypatch.setattr(orbax.CompositeCheckpointHandler, "restore", fail)
    checkpoints = Checkpoints(saved)
    with pytest.raises(UserError, match="checkpoints/8: the checkpoint cannot be read .*RESOURCE_EXHAUSTED"):
        checkpoints.restore("tiny", SPECS, shardings(SPECS, ONE))


@pytest.mark.parametrize(
    ("status", "number"), [("UNKNOWN", errno.EIO), ("FAILED_PRECONDITION", errno.ENOTCONN), ("ABORTED", errno.ESTALE)]
)
def test_a_disk_that_fails_is_not_corruption(saved, monkeypatch, status, number):
    """The next attempt may succeed: until then no older state is used, and no step is set aside."""

    def fail(*arguments, **options):
        raise ValueError(
            f'{status}: Error reading "expert.inner/c/0/0/0" in OCDBT database at local file "/log/8/theta/": Error '
            f"reading from open file /{'a' * 300}/theta/d/4fa6: Failed to read from file: Failed to read 1946 bytes "
            f"from file at offset 0: {os.strerror(number)} [os_error_code='{number}'] [tensorstore_spec='{{}}']"
        )

    monkeypatch.setattr(orbax.CompositeCheckpointHandler, "restore", fail)
    checkpoints, targets = Checkpoints(saved, keep=9), shardings(SPECS, ONE)
    expected = f"checkpoints/8: .*expert.inner.* in theta.*theta/d/4fa6.*{os.strerror(number)}.; it is not changed"
    for read in (
        lambda: checkpoints.restore("tiny", SPECS, targets),
        lambda: checkpoints.restore_theta("tiny", SPECS["theta"], targets["theta"]),
    ):
        with pytest.raises(UserError, match=expected):
            read()
    assert checkpoints.latest() == 8


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EISDIR, errno.ENOTDIR])
def test_a_file_that_is_gone_is_corruption(number):
    """Whatever library reports it."""
    error = ValueError(f"Error reading a file: {os.strerror(number)} [os_error_code='{number}']")
    assert (
        is_corruption(error)
        and not is_read_failure(error)
        and not is_read_failure(OSError(number, os.strerror(number)))
    )


def test_verify_names_the_array(flipped):
    """The full check reads every array, so it finds what sizes do not show."""
    checkpoints = Checkpoints(flipped)
    assert checkpoint_tools.verify(checkpoints, 4) == []
    found = checkpoint_tools.verify(checkpoints, 8)
    assert len(found) == 1 and found[0].startswith("theta/expert/inner cannot be read (")


def test_checkpoint_of_version_1_is_read_to_be_verified(saved, tmp_path):
    """Its chunks may have no checksum, but its manifest has the hash of every file."""
    shutil.copytree(saved, tmp_path / "log")
    step = tmp_path / "log" / "checkpoints" / "8"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_manifest, "_SMALL_BYTES", 2**20)
        patch.setattr(checkpoint_manifest, "_VERSION", 1)
        checkpoint_manifest.write_manifest(step, 5)
    assert Checkpoints(tmp_path / "log").latest() == 8
    flip(largest(step, ARRAYS))
    assert Checkpoints(tmp_path / "log").latest() == 4


def test_saving_reads_no_array(tmp_path):
    """64 MiB are written, and next to nothing is read."""
    theta = {"embedding": np.random.default_rng(0).random((64, 2**18), np.float32)}
    save(tmp_path / "warm", 4)  # what is read the first time, such as modules
    before = bytes_read()
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save_weights(4, "tiny", theta, "a test")
    checkpoints.close()
    assert checkpoint_manifest.size(checkpoints.path(4)) > 2**25 and bytes_read() - before < 2**20


def test_start_reads_no_array(tmp_path):
    """100 GB are checked by their sizes: less than 1 MiB is read."""
    make_sparse(tmp_path, 8, 100 * 10**9)
    before = bytes_read()
    assert Checkpoints(tmp_path).latest() == 8
    assert bytes_read() - before < 2**20
    truncate(largest(tmp_path / "checkpoints" / "8" / "rest"))
    with pytest.raises(UserError, match="no checkpoint is valid"):
        Checkpoints(tmp_path).latest()
