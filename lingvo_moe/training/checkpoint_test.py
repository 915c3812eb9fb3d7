"""A checkpoint gives back what was saved, on any mesh, or says in a line what is wrong; nothing that was saved is lost."""

from __future__ import annotations

import errno
import itertools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from orbax import checkpoint as orbax

from lingvo_moe import experiment, tree
from lingvo_moe.errors import UserError
from lingvo_moe.sharding.layout import DeviceMesh, Spec
from lingvo_moe.testing.checkpoints import (
    ONE,
    SPECS,
    assert_equal,
    flip,
    names,
    restore,
    save,
    shardings,
    state_of,
    truncate,
)
from lingvo_moe.training.checkpoint import Checkpoints, _disk_errors


def test_a_state_moves_between_meshes_value_for_value(tmp_path):
    """The Quickstart model's own weights and optimizer_state, saved on four devices, restored on 1, 2, 8 and four by two."""
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


def test_the_newest_ones_are_kept(tmp_path):
    save(tmp_path, 4, 8, 12, keep=2)
    assert names(tmp_path) == {"8", "12"}
    save(tmp_path, 16, keep=2)
    assert names(tmp_path) == {"12", "16"} and restore(tmp_path).step == 16


def test_a_state_may_be_donated_as_soon_as_it_is_being_saved(tmp_path):
    """The next step reuses its memory while the checkpoint is still being written."""
    state, checkpoints = state_of(1), Checkpoints(tmp_path, keep=1)
    checkpoints.save("tiny", state, None)
    for leaf in tree.flatten(state).values():
        leaf.delete()
    checkpoints.close()
    assert_equal(restore(tmp_path).state, state_of(1))


def test_translation_needs_the_weights_alone(tmp_path):
    """The optimizer state need not be there, be read or fit into memory."""
    save(tmp_path, 3)
    shutil.rmtree(tmp_path / "checkpoints" / "3" / "rest")
    step, theta = Checkpoints(tmp_path).restore_theta("tiny", SPECS["theta"], shardings(SPECS, ONE)["theta"])
    assert step == 3
    assert_equal(theta, state_of(3)["theta"])


def test_looking_for_a_checkpoint_creates_nothing(tmp_path):
    for logdir in (tmp_path, tmp_path / "nowhere"):
        assert Checkpoints(logdir, keep=1).latest() is None
        with pytest.raises(
            UserError, match=f"{logdir}.*no checkpoint. Train first: .*train --model=tiny --logdir={logdir}"
        ):
            restore(logdir)
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_left_is_no_checkpoint_and_goes_away(tmp_path):
    """Who only reads leaves it alone: it may be a save in progress."""
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
def test_a_checkpoint_of_another_model_is_refused(tmp_path, change, difference):
    """By name and by the first weight that differs; the checkpoint stays as it is."""
    save(tmp_path, 4)
    other = dict(SPECS, theta=SPECS["theta"] | change)
    placed = shardings(other, ONE)
    message = f"checkpoints/4 holds tiny, whose weights are not those of other: {difference}. Pass that --model"
    for refused in (
        lambda c: c.restore("other", other, placed),
        lambda c: c.require("other", other["theta"]),
        lambda c: c.restore_theta("other", other["theta"], placed["theta"]),
    ):
        with pytest.raises(UserError, match=message):
            refused(Checkpoints(tmp_path))
    assert_equal(restore(tmp_path).state, state_of(4))


def refused_save(logdir: pathlib.Path, size: int) -> subprocess.CompletedProcess:
    """Saves step 8 where no file may grow beyond `size`, in a process of its own, whose threads end with it."""
    code = (
        "import pathlib, sys\nfrom lingvo_moe.cli import app\nfrom lingvo_moe.training import checkpoint_test as test\n"
        "def main(arguments):\n    with test.files_up_to(int(arguments[2])):\n"
        "        test.save(pathlib.Path(arguments[1]), 8)\napp.run(main)"
    )
    return subprocess.run(
        [sys.executable, "-c", code, logdir, str(size)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


@pytest.mark.parametrize("size", [0, 300, 600])
def test_a_save_that_the_file_system_refuses_is_told_and_costs_no_older_checkpoint(tmp_path, size):
    """Refused at the first file, in the middle, at the last: the same command goes on once there is room."""
    save(tmp_path, 4)
    refused = refused_save(tmp_path, size)
    # The words of the kernel for a full disk are others, see below.
    # Threads of Orbax's may write of what else failed to them, before or after our line.
    expected = (
        rf"^error: {tmp_path}/checkpoints: the checkpoint could not be written \(File too large; \d+ MiB are free\). "
        r"Checkpoints saved before are complete. Make room and run the same command again.$"
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
            'RESOURCE_EXHAUSTED: Error writing "a/0.0" in OCDBT database: Failed to write 7204 bytes to file 4: No space left '
            "on device [os_error_code='28']"
        ),
    ],
)
def test_a_full_disk_is_called_one(tmp_path, monkeypatch, error):
    def save_nothing(*arguments, **options):
        raise error

    monkeypatch.setattr(orbax.CheckpointManager, "save", save_nothing)
    with pytest.raises(UserError, match=r"could not be written \(No space left on device; \d+ MiB are free\)"):
        save(tmp_path, 4)


def test_files_that_are_removed_while_they_are_written_are_no_defect(tmp_path):
    with (
        pytest.raises(UserError, match="could not be written .somebody has removed what was written"),
        _disk_errors(tmp_path),
    ):
        raise ValueError(
            'NOT_FOUND: Error opening "zarr" driver: Error reading local file "a/ocdbt.process_0/d/ca9219"'
        )


def test_a_defect_while_saving_keeps_its_traceback(tmp_path):
    with pytest.raises(AttributeError), _disk_errors(tmp_path):
        raise AttributeError("a defect")


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        *itertools.product(
            ["meta/metadata", "theta/manifest.ocdbt", "rest/d/*", "theta/ocdbt.process_0/d/*", "_CHECKPOINT_METADATA"],
            [flip, truncate, pathlib.Path.unlink],
        ),
        ("manifest.json", flip),
        ("manifest.json", truncate),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_takes_its_place(tmp_path, capsys, file, damage):
    """Bit flips, truncated and missing files never become wrong weights, and are told once, with path and file."""
    save(tmp_path, 4, 8)
    damaged = tmp_path / "checkpoints" / "8"
    path = max(damaged.glob(file), key=lambda path: path.stat().st_size)
    damage(path)
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest() == 4
    saved = checkpoints.restore("tiny", SPECS, shardings(SPECS, ONE))
    assert (saved.step, saved.data_state) == (4, {"next": 4})
    assert_equal(saved.state, state_of(4))
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2 and told[0].startswith(f"checkpoint: {damaged} is damaged: {path.relative_to(damaged)} "), (
        told
    )
    assert told[1] == f"checkpoint: {tmp_path / 'checkpoints' / '4'} is used instead."
    assert names(tmp_path) == {"4", "8"}, "who only reads changes nothing"


def test_where_all_are_damaged_nothing_is_restored_and_nothing_lost(tmp_path):
    """Training does not begin anew in a log directory where there was something."""
    save(tmp_path, 4, 8)
    for step in (4, 8):
        flip(tmp_path / "checkpoints" / str(step) / "theta" / "_METADATA")
    for checkpoints in (Checkpoints(tmp_path), Checkpoints(tmp_path, keep=1)):
        with pytest.raises(
            UserError, match=f"{tmp_path}/checkpoints: no checkpoint is sound; damaged: 4, 8. Bring one back"
        ):
            checkpoints.latest()
    assert names(tmp_path) == {"4", "8"}


def test_training_that_goes_on_saves_the_damaged_number_again(tmp_path, capsys):
    """The damaged directory is renamed, not overwritten, as often as it happens; keep-N neither counts nor deletes it."""
    save(tmp_path, 4, 8)
    damaged = tmp_path / "checkpoints" / "8"
    for aside in ("8.damaged", "8.damaged.2"):
        flip(damaged / "meta" / "metadata")
        content = (damaged / "meta" / "metadata").read_bytes()
        resumed = Checkpoints(tmp_path, keep=2)
        assert resumed.latest() == 4 and damaged.exists()
        resumed.save("tiny", state_of(8), {"next": 8})
        resumed.close()
        assert f"{damaged} is damaged and now called {aside}." in capsys.readouterr().err
        assert (damaged.parent / aside / "meta" / "metadata").read_bytes() == content
        assert_equal(restore(tmp_path).state, state_of(8))
    save(tmp_path, 12, 16, keep=2)
    assert names(tmp_path) == {"12", "16", "8.damaged", "8.damaged.2"}


def test_killed_before_the_manifest_was_written_costs_nothing(tmp_path, capsys):
    """The arrays are read instead; who may write adds the manifest, who only reads does not."""
    save(tmp_path, 4, 8)
    manifest = tmp_path / "checkpoints" / "8" / "manifest.json"
    before = manifest.read_bytes()
    manifest.unlink()
    (manifest.parent / "manifest.json.partial").write_text("{")
    assert restore(tmp_path).step == 8 and not manifest.exists()
    assert f"{manifest.parent} has no manifest.json" in capsys.readouterr().err
    assert Checkpoints(tmp_path, keep=2).latest() == 8 and manifest.read_bytes() == before
    capsys.readouterr()
    assert restore(tmp_path).step == 8 and not capsys.readouterr().err


@pytest.mark.parametrize(
    "file", ["meta/metadata", "theta/manifest.ocdbt", "theta/_METADATA", "theta/ocdbt.process_0/d/*"]
)
def test_a_partial_checkpoint_without_a_manifest_is_damaged(tmp_path, capsys, file):
    """A copy that was interrupted, for instance."""
    save(tmp_path, 4, 8)
    partial = tmp_path / "checkpoints" / "8"
    (partial / "manifest.json").unlink()
    max(partial.glob(file), key=lambda path: path.stat().st_size).unlink()
    assert restore(tmp_path).step == 4
    assert re.match(f"checkpoint: {partial} is damaged: (meta|theta).* cannot be read ", capsys.readouterr().err)


def test_meta_of_something_else_is_a_damaged_checkpoint(tmp_path, capsys):
    save(tmp_path, 4)
    directory = tmp_path / "checkpoints" / "4"
    (directory / "meta" / "metadata").write_text(json.dumps({"model": "tiny"}))
    (directory / "manifest.json").unlink()
    with pytest.raises(UserError, match="no checkpoint is sound"):
        restore(tmp_path)
    assert f"{directory} is damaged: meta lacks an entry." in capsys.readouterr().err


def test_weights_alone_can_be_used_but_not_trained_on(tmp_path):
    """To one that will write, and so to train, they are refused before anything is compiled."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save_weights(4, "tiny", state_of(4)["theta"], "average of steps 2, 4")
    checkpoints.close()
    step, theta = Checkpoints(tmp_path).restore_theta("tiny", SPECS["theta"], shardings(SPECS, ONE)["theta"])
    assert step == 4
    assert_equal(theta, state_of(4)["theta"])
    Checkpoints(tmp_path).require("tiny", SPECS["theta"])
    for refused in (lambda: restore(tmp_path), lambda: Checkpoints(tmp_path, keep=1).require("tiny", SPECS["theta"])):
        with pytest.raises(UserError, match=r"checkpoints/4 holds weights alone \(average of steps 2, 4\)"):
            refused()
