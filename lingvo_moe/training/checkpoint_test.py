"""Checkpoints: round trips between meshes, retention, full disks, and fallback from a corrupt checkpoint."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading

import pytest
from orbax import checkpoint as orbax

from lingvo_moe import experiment, tree
from lingvo_moe.distributed.process_group import ProcessGroup
from lingvo_moe.errors import UserError
from lingvo_moe.sharding.layout import DeviceMesh, Spec
from lingvo_moe.testing.checkpoints import (
    ONE,
    SPECS,
    assert_equal,
    flip,
    largest,
    names,
    restore,
    save,
    shardings,
    state_of,
    truncate,
)
from lingvo_moe.training import checkpoint_manifest, disk_errors
from lingvo_moe.training.checkpoint import Checkpoints
from lingvo_moe.training.checkpoint_errors import RemovedCheckpoint
from lingvo_moe.training.checkpoint_reader import Reader
from lingvo_moe.utils import allocator


@pytest.mark.slow
def test_round_trip_between_meshes(tmp_path):
    """The Quickstart model's state, saved on four devices, is equal when restored on 1, 2, 8 and 4x2."""
    specs = experiment.get(
        "m4.Quickstart", ["source_vocabulary=64", "target_vocabulary=64", "model_dim=32"]
    ).steps.state_specs()
    state = state_of(7, specs, DeviceMesh((4,)))
    assert any(not leaf.sharding.is_fully_replicated for leaf in tree.flatten(state).values())
    writing = Checkpoints(tmp_path, keep=1)
    writing.save("tiny", state, {"next": 70, "waiting": [3, 5]})
    writing.close()
    for mesh in (ONE, DeviceMesh((2,)), DeviceMesh((8,)), DeviceMesh((4, 2))):
        placed = shardings(specs, mesh)
        saved = Checkpoints(tmp_path).restore("tiny", specs, placed)
        assert (saved.step, saved.data_state) == (7, {"next": 70, "waiting": [3, 5]})
        assert_equal(saved.state, state)
        for path, leaf in tree.flatten(saved.state).items():
            assert leaf.sharding == tree.flatten(placed)[path], path


def test_what_a_save_has_freed_is_returned(tmp_path, monkeypatch):
    """A training process grew by 8 MB with each checkpoint, whatever the size of its model."""
    returned = []
    monkeypatch.setattr(allocator, "return_freed_memory", lambda: returned.append(True))
    with contextlib.closing(Checkpoints(tmp_path, keep=1)) as checkpoints:
        for step in (1, 2):
            checkpoints.save("tiny", state_of(step), {})
    assert returned == [True, True]


def test_retention(tmp_path):
    """The newest `keep` checkpoints stay."""
    save(tmp_path, 4, 8, 12, keep=2)
    assert names(tmp_path) == {"8", "12"}
    save(tmp_path, 16, keep=2)
    assert names(tmp_path) == {"12", "16"} and restore(tmp_path).step == 16


def test_state_may_be_donated_after_save(tmp_path):
    """The next step reuses the memory while the checkpoint is still being written."""
    state, checkpoints = state_of(1), Checkpoints(tmp_path, keep=1)
    checkpoints.save("tiny", state, None)
    for leaf in tree.flatten(state).values():
        leaf.delete()
    checkpoints.close()
    assert_equal(restore(tmp_path).state, state_of(1))


def test_weights_are_read_without_the_optimizer_state(tmp_path):
    """Inference needs no optimizer state: it need not exist or fit into memory."""
    save(tmp_path, 3)
    shutil.rmtree(tmp_path / "checkpoints" / "3" / "rest")
    step, theta = Checkpoints(tmp_path).restore_theta("tiny", SPECS["theta"], shardings(SPECS, ONE)["theta"])
    assert step == 3
    assert_equal(theta, state_of(3)["theta"])


def test_reading_creates_nothing(tmp_path):
    """Neither in an empty directory nor in one that does not exist; the error names the command that trains."""
    for logdir in (tmp_path, tmp_path / "nowhere"):
        assert Checkpoints(logdir, keep=1).latest() is None
        with pytest.raises(
            UserError, match=f"{logdir}.*no checkpoint. Train first: .*train --model=tiny --logdir={logdir}"
        ):
            restore(logdir)
    assert not list(tmp_path.iterdir())
    (tmp_path / "weights").touch()
    with pytest.raises(UserError, match="/weights is a file; expected the log directory of a training run"):
        restore(tmp_path / "weights")


def test_temporary_directory_of_a_killed_process(tmp_path):
    """It is not a checkpoint. A reader leaves it: it may be a save in progress. The next save removes it."""
    save(tmp_path, 4)
    shutil.copytree(tmp_path / "checkpoints" / "4", tmp_path / "checkpoints" / "8.orbax-checkpoint-tmp")
    assert restore(tmp_path).step == 4
    assert names(tmp_path) == {"4", "8.orbax-checkpoint-tmp"}
    save(tmp_path, 12)
    assert names(tmp_path) == {"4", "12"}


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"embedding": Spec((16, 9), "float32", "VM")}, r"embedding is \[16, 8\] there, \[16, 9\] here"),
        ({"bias": Spec((8,), "float32", "M")}, r"bias is absent there, \[8\] here"),
    ],
)
def test_checkpoint_of_another_model_is_refused(tmp_path, change, difference):
    """The error names the model and the first weight that differs; the checkpoint stays as it is."""
    save(tmp_path, 4)
    other = dict(SPECS, theta=SPECS["theta"] | change)
    placed = shardings(other, ONE)
    message = f"checkpoints/4 holds tiny, whose weights are not those of other: {difference}. Pass that --model"
    for refused in (
        lambda c: c.restore("other", other, placed),
        lambda c: c.newest_compatible_step("other", other["theta"]),
        lambda c: c.restore_theta("other", other["theta"], placed["theta"]),
    ):
        with pytest.raises(UserError, match=message):
            refused(Checkpoints(tmp_path))
    with pytest.raises(UserError, match="Pass the --set of .* was trained with, and no other --set of the model, or"):
        Checkpoints(tmp_path).newest_compatible_step("tiny", other["theta"])
    assert_equal(restore(tmp_path).state, state_of(4))


def refused_save(logdir: pathlib.Path, size: int) -> subprocess.CompletedProcess:
    """Saves step 8 in a process of its own, whose files may not grow beyond `size` bytes."""
    code = (
        "import pathlib, sys\nfrom lingvo_moe.cli import app\nfrom lingvo_moe.testing import checkpoints\n"
        "def main(arguments):\n    with checkpoints.files_up_to(int(arguments[2])):\n"
        "        checkpoints.save(pathlib.Path(arguments[1]), 8)\napp.run(main)"
    )
    return subprocess.run(
        [sys.executable, "-c", code, logdir, str(size)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 300, 600])
def test_save_refused_by_the_file_system(tmp_path, size):
    """At the first, a middle and the last file: one error; older checkpoints stay; later the same command works."""
    save(tmp_path, 4)
    refused = refused_save(tmp_path, size)
    # The kernel words a full disk differently, see below. Threads of Orbax may report other failures before or after.
    expected = (
        rf"^error: {tmp_path}/checkpoints: the checkpoint could not be written \(File too large; \d+ MiB are free\). "
        r"Checkpoints saved before are complete. Remove the cause and run the same command again.$"
    )
    assert refused.returncode == 2 and re.search(expected, refused.stderr, re.MULTILINE), refused.stderr
    assert restore(tmp_path).step == 4
    save(tmp_path, 8)
    assert names(tmp_path) == {"4", "8"}
    assert_equal(restore(tmp_path).state, state_of(8))


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device", "some/file"),
        # What TensorStore raises.
        ValueError(
            'RESOURCE_EXHAUSTED: Error writing "a/0.0" in OCDBT database: Failed to write 72 bytes to file 4: No space '
            "left on device [os_error_code='28']"
        ),
    ],
)
def test_full_disk_is_named(tmp_path, monkeypatch, error):
    """Whether Python or TensorStore reports it."""

    def save_nothing(*arguments, **options):
        raise error

    monkeypatch.setattr(orbax.CheckpointManager, "save", save_nothing)
    with pytest.raises(UserError, match=r"could not be written \(No space left on device; \d+ MiB.*Free disk space"):
        save(tmp_path, 4)


@pytest.mark.parametrize("name", ["run[1]", "a*", "a?", "a\\b", "\udcff", "gs:"])
def test_a_path_that_orbax_misreads_is_refused(tmp_path, name):
    """Below most of these, checkpoints without arrays, or in other directories, were written without an error."""
    with pytest.raises(UserError, match="expected a log directory without .* in its path"):
        Checkpoints(tmp_path / name, keep=1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["a b", "é", "{a}", "a]", "a%20b", "a#b", "$HOME", "~", "s3:", "a:b", "x" * 255])
def test_other_paths_are_as_good_as_any(tmp_path, name):
    save(tmp_path / name, 8)
    assert restore(tmp_path / name).step == 8


def test_a_log_directory_that_was_renamed_can_be_read(tmp_path):
    """Orbax looks for files by patterns only where it writes."""
    save(tmp_path / "run", 8)
    (tmp_path / "run").rename(tmp_path / "run [1]")
    assert restore(tmp_path / "run [1]").step == 8


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_a_file_server_that_does_not_answer_is_named(tmp_path, number):
    """In a message of TensorStore, without a traceback; more space would not help."""
    refusal = re.escape(os.strerror(number))
    with (
        pytest.raises(UserError, match=rf"could not be written \({refusal}; \d+ MiB are free\).*Remove the cause"),
        disk_errors.of_checkpoints(tmp_path),
    ):
        raise ValueError(f'UNKNOWN: Error writing "a/0.0": Failed to write: {os.strerror(number)}')


def test_a_full_disk_is_named_as_the_directory_is_released(tmp_path, monkeypatch):
    """There Orbax raises the error of the last save again, of many lines."""
    error = ValueError("RESOURCE_EXHAUSTED: Failed to write 72 bytes to file 4: No space left on device")

    def close(manager):
        raise error

    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save("tiny", state_of(4), {"next": 4})
    checkpoints.wait()
    monkeypatch.setattr(orbax.CheckpointManager, "close", close)
    with pytest.raises(UserError, match=r"could not be written \(No space left on device; \d+ MiB are free\)"):
        checkpoints.close()
    monkeypatch.undo()
    checkpoints.close()


def test_what_could_not_be_written_is_released(tmp_path, monkeypatch):
    """Orbax's manager and the thread that writes manifests, which a process that goes on would keep."""

    def refuse(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device", "some/file")

    closed, threads = [], set(threading.enumerate())
    close = orbax.CheckpointManager.close
    monkeypatch.setattr(checkpoint_manifest, "write_manifest", refuse)
    monkeypatch.setattr(orbax.CheckpointManager, "close", lambda manager: [closed.append(manager), close(manager)])
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save("tiny", state_of(4), {"next": 4})
    with pytest.raises(UserError, match=r"could not be written \(No space left on device; \d+ MiB are free\)"):
        checkpoints.close()
    assert len(closed) == 1
    assert not [thread for thread in set(threading.enumerate()) - threads if thread.name.startswith("manifest")]


def test_files_removed_while_they_are_written(tmp_path):
    """This is an error of the environment, so it is one line without a traceback."""
    with (
        pytest.raises(UserError, match="could not be written .the files were removed while they were written"),
        disk_errors.of_checkpoints(tmp_path),
    ):
        raise ValueError(
            'NOT_FOUND: Error opening "zarr" driver: Error reading local file "a/ocdbt.process_0/d/ca9219"'
        )


def test_bug_while_saving_keeps_its_traceback(tmp_path):
    """An exception that is not about the disk is not turned into a UserError."""
    with pytest.raises(AttributeError), disk_errors.of_checkpoints(tmp_path):
        raise AttributeError("a bug")


@pytest.mark.parametrize(
    ("file", "change"),
    [
        *itertools.product(
            ["meta/metadata", "theta/manifest.ocdbt", "rest/d/*", "theta/ocdbt.process_0/d/*", "_CHECKPOINT_METADATA"],
            [flip, truncate, pathlib.Path.unlink],
        ),
        ("manifest.json", flip),
        ("manifest.json", truncate),
    ],
)
def test_corrupt_checkpoint_is_logged_and_the_previous_one_is_used(tmp_path, caplog, file, change):
    """Bit flips, truncated and missing files never become wrong weights; each is logged once, with path and file."""
    save(tmp_path, 4, 8)
    corrupt = tmp_path / "checkpoints" / "8"
    path = largest(corrupt, file)
    change(path)
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest() == 4
    saved = checkpoints.restore("tiny", SPECS, shardings(SPECS, ONE))
    assert (saved.step, saved.data_state) == (4, {"next": 4})
    assert_equal(saved.state, state_of(4))
    assert len(caplog.messages) == 2, caplog.messages
    assert caplog.messages[0].startswith(f"{corrupt} is corrupt: {path.relative_to(corrupt)} ")
    assert caplog.messages[1] == f"{tmp_path / 'checkpoints' / '4'} is used instead."
    assert names(tmp_path) == {"4", "8"}, "a reader changes nothing"


def test_all_checkpoints_corrupt(tmp_path):
    """Training does not start again in a log directory where there was a checkpoint; nothing is deleted."""
    save(tmp_path, 4, 8)
    for step in (4, 8):
        flip(tmp_path / "checkpoints" / str(step) / "theta" / "_METADATA")
    for checkpoints in (Checkpoints(tmp_path), Checkpoints(tmp_path, keep=1)):
        with pytest.raises(
            UserError, match=f"{tmp_path}/checkpoints: no checkpoint is valid; corrupt: 4, 8. Restore one"
        ):
            checkpoints.latest()
    assert names(tmp_path) == {"4", "8"}


def test_corrupt_checkpoint_is_renamed_when_its_step_is_saved_again(tmp_path, caplog):
    """It is not overwritten, as often as it happens; retention neither counts nor deletes it."""
    save(tmp_path, 4, 8)
    corrupt = tmp_path / "checkpoints" / "8"
    for aside in ("8.corrupt", "8.corrupt.2"):
        flip(corrupt / "meta" / "metadata")
        content = (corrupt / "meta" / "metadata").read_bytes()
        resumed = Checkpoints(tmp_path, keep=2)
        assert resumed.latest() == 4 and corrupt.exists()
        resumed.save("tiny", state_of(8), {"next": 8})
        resumed.close()
        assert f"{corrupt} is corrupt and was renamed to {aside}." in caplog.messages
        assert (corrupt.parent / aside / "meta" / "metadata").read_bytes() == content
        assert_equal(restore(tmp_path).state, state_of(8))
    save(tmp_path, 12, 16, keep=2)
    assert names(tmp_path) == {"12", "16", "8.corrupt", "8.corrupt.2"}


def test_killed_before_the_manifest_was_written(tmp_path, caplog):
    """The arrays are read instead. A process that saves adds the manifest, a reader does not."""
    save(tmp_path, 4, 8)
    manifest = tmp_path / "checkpoints" / "8" / "manifest.json"
    before = manifest.read_bytes()
    manifest.unlink()
    (manifest.parent / "manifest.json.partial").write_text("{")
    assert restore(tmp_path).step == 8 and not manifest.exists()
    assert f"{manifest.parent} has no manifest.json" in caplog.text
    assert Checkpoints(tmp_path, keep=2).latest() == 8 and manifest.read_bytes() == before
    caplog.clear()
    assert restore(tmp_path).step == 8 and not caplog.messages


@pytest.mark.parametrize(
    "file", ["meta/metadata", "theta/manifest.ocdbt", "theta/_METADATA", "theta/ocdbt.process_0/d/*"]
)
def test_incomplete_checkpoint_without_a_manifest(tmp_path, caplog, file):
    """An interrupted copy, for instance, is corrupt."""
    save(tmp_path, 4, 8)
    partial = tmp_path / "checkpoints" / "8"
    (partial / "manifest.json").unlink()
    max(partial.glob(file), key=lambda path: path.stat().st_size).unlink()
    assert restore(tmp_path).step == 4
    assert re.match(f"{partial} is corrupt: (meta|theta).* cannot be read ", caplog.messages[0])


def test_meta_without_its_entries_is_corrupt(tmp_path, caplog):
    """As if another program had written the directory."""
    save(tmp_path, 4)
    directory = tmp_path / "checkpoints" / "4"
    (directory / "meta" / "metadata").write_text(json.dumps({"model": "tiny"}))
    (directory / "manifest.json").unlink()
    with pytest.raises(UserError, match="no checkpoint is valid"):
        restore(tmp_path)
    assert f"{directory} is corrupt: meta lacks an entry, or has one of another kind." in caplog.messages


def test_a_seed_that_one_process_cannot_read_stops_all(tmp_path, monkeypatch):
    """Whichever process it is: the others would wait for it."""
    gathered = []

    class Two(ProcessGroup):
        def gather(self, value):
            gathered.append(value)
            return [value, None if value else ["RemovedCheckpoint", "the other's step is gone"]]

    def refuse(*_):
        raise UserError("a file server has restarted")

    save(tmp_path, 4)
    with pytest.raises(RemovedCheckpoint, match="^the other's step is gone$"):
        Checkpoints(tmp_path, processes=Two()).newest_compatible_state("tiny", SPECS)
    monkeypatch.setattr(Reader, "read", refuse)
    with pytest.raises(UserError, match="^a file server has restarted$"):
        Checkpoints(tmp_path, processes=Two()).newest_compatible_state("tiny", SPECS)
    assert gathered == [None, ["UserError", "a file server has restarted"]]


def test_weights_only_checkpoint_is_for_inference(tmp_path):
    """Training refuses it before anything is compiled."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save_weights(4, "tiny", state_of(4)["theta"], "average of steps 2, 4")
    checkpoints.close()
    step, theta = Checkpoints(tmp_path).restore_theta("tiny", SPECS["theta"], shardings(SPECS, ONE)["theta"])
    assert step == 4
    assert_equal(theta, state_of(4)["theta"])
    Checkpoints(tmp_path).newest_compatible_step("tiny", SPECS["theta"])
    for refused in (
        lambda: restore(tmp_path),
        lambda: Checkpoints(tmp_path, keep=1).newest_compatible_step("tiny", SPECS["theta"]),
    ):
        with pytest.raises(UserError, match=r"checkpoints/4 holds weights only \(average of steps 2, 4\)"):
            refused()
