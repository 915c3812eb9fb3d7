"""A checkpoint gives back what was saved, on any mesh, or says in a line what is wrong; nothing that was saved is lost."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import pathlib
import re
import resource
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax import checkpoint as orbax

from lingvo_moe import experiment, tree
from lingvo_moe.errors import UserError
from lingvo_moe.layout import DeviceMesh, Layout, Spec
from lingvo_moe.training.checkpoint import Checkpoints, _disk_errors

SPECS = {"step": Spec((), "int32", ""), "seed": Spec((2,), "int32", "s"),
         "theta": {"embedding": Spec((16, 8), "float32", "VM"), "expert": {"inner": Spec((4, 8, 16), "float32", "EMH")}},
         "slots": {"embedding": {"row": Spec((16,), "float32", "V")}}}
ONE = DeviceMesh((1,))


def shardings(specs: dict, mesh: DeviceMesh) -> dict:
    devices = Mesh(np.array(jax.devices()[:mesh.size]).reshape(mesh.shape), mesh.axis_names)
    layout = Layout.of(mesh)
    return tree.map_leaves(lambda spec: NamedSharding(devices, PartitionSpec(*layout.axes(spec.letters))), specs)


def state_of(step: int, specs: dict = SPECS, mesh: DeviceMesh = ONE) -> dict:
    """A state with other random values at every step and in every leaf."""
    random = np.random.RandomState(step)
    state = tree.map_leaves(lambda spec: random.normal(size=spec.shape).astype(spec.dtype), specs) | {"step": np.int32(step)}
    return tree.map_leaves(jax.device_put, state, shardings(specs, mesh))


def save(logdir: pathlib.Path, *steps: int, keep: int = 9):
    checkpoints = Checkpoints(logdir, keep)
    for step in steps:
        checkpoints.save("tiny", state_of(step), {"next": step})
    checkpoints.close()


def restore(logdir: pathlib.Path):
    return Checkpoints(logdir).restore("tiny", SPECS, shardings(SPECS, ONE))


def assert_equal(found: dict, expected: dict):
    found, expected = tree.flatten(found), tree.flatten(expected)
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(np.asarray(found[path]), np.asarray(value), err_msg=path)


def names(logdir: pathlib.Path) -> set[str]:
    return {path.name for path in (logdir / "checkpoints").iterdir()}


def test_a_state_moves_between_meshes_value_for_value(tmp_path):
    """The Quickstart model's own weights and slots, saved on four devices, restored on one and on two by two."""
    specs = experiment.get("m4.Quickstart", ["source_vocabulary=64", "target_vocabulary=64", "model_dim=32"]).steps.state_specs()
    state = state_of(7, specs, DeviceMesh((4,)))
    assert any(not leaf.sharding.is_fully_replicated for leaf in tree.flatten(state).values())
    writing = Checkpoints(tmp_path, keep=1)
    writing.save("tiny", state, {"next": 70, "waiting": [3, 5]})
    writing.close()
    for mesh in (ONE, DeviceMesh((2, 2))):
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
    """The optimizer's slots need not be there, be read or fit into memory."""
    save(tmp_path, 3)
    shutil.rmtree(tmp_path / "checkpoints" / "3" / "rest")
    step, theta = Checkpoints(tmp_path).restore_theta("tiny", SPECS["theta"], shardings(SPECS, ONE)["theta"])
    assert step == 3
    assert_equal(theta, state_of(3)["theta"])


def test_looking_for_a_checkpoint_creates_nothing(tmp_path):
    for logdir in (tmp_path, tmp_path / "nowhere"):
        assert Checkpoints(logdir, keep=1).latest() is None
        with pytest.raises(UserError, match=f"{logdir}.*no checkpoint. Train first: .*train --model=tiny --logdir={logdir}"):
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


@pytest.mark.parametrize(("change", "difference"), [
    ({"embedding": Spec((16, 9), "float32", "VM")}, r"embedding is \[16, 8\] there, \[16, 9\] here"),
    ({"bias": Spec((8,), "float32", "M")}, r"bias is absent there, \[8\] here"),
])
def test_a_checkpoint_of_another_model_is_refused(tmp_path, change, difference):
    """By name and by the first weight that differs; the checkpoint stays as it is."""
    save(tmp_path, 4)
    other = dict(SPECS, theta=SPECS["theta"] | change)
    placed = shardings(other, ONE)
    message = f"checkpoints/4 holds tiny, whose weights are not those of other: {difference}. Pass that --model"
    for refused in (lambda c: c.restore("other", other, placed), lambda c: c.require("other", other["theta"]),
                    lambda c: c.restore_theta("other", other["theta"], placed["theta"])):
        with pytest.raises(UserError, match=message):
            refused(Checkpoints(tmp_path))
    assert_equal(restore(tmp_path).state, state_of(4))


@contextlib.contextmanager
def files_up_to(size: int):
    """The kernel refuses to let any file of this process grow beyond `size` bytes, in whichever thread and language."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def refused_save(logdir: pathlib.Path, size: int) -> subprocess.CompletedProcess:
    """Saves step 8 where no file may grow beyond `size`, in a process of its own, whose threads end with it."""
    code = ("import pathlib, sys\nfrom lingvo_moe import cli\nfrom lingvo_moe.training import checkpoint_test as test\n"
            "def main(arguments):\n    with test.files_up_to(int(arguments[2])):\n"
            "        test.save(pathlib.Path(arguments[1]), 8)\ncli.run(main)")
    return subprocess.run([sys.executable, "-c", code, logdir, str(size)], capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})


@pytest.mark.parametrize("size", [0, 300, 600])
def test_a_save_that_the_file_system_refuses_is_told_and_costs_no_older_checkpoint(tmp_path, size):
    """Refused at the first file, in the middle, at the last: the same command goes on once there is room."""
    save(tmp_path, 4)
    refused = refused_save(tmp_path, size)
    # The words of the kernel for a full disk are others, see below.
    # Threads of Orbax's may write of what else failed to them, before or after our line.
    expected = (rf"^error: {tmp_path}/checkpoints: the checkpoint could not be written \(File too large; \d+ MiB are free\). "
                r"Checkpoints saved before are complete. Make room and run the same command again.$")
    assert refused.returncode == 2 and re.search(expected, refused.stderr, re.MULTILINE), refused.stderr
    assert restore(tmp_path).step == 4
    save(tmp_path, 8)
    assert names(tmp_path) == {"4", "8"}
    assert_equal(restore(tmp_path).state, state_of(8))


@pytest.mark.parametrize("error", [
    OSError(errno.ENOSPC, "No space left on device", "some/file"),
    # What TensorStore raises.
    ValueError("RESOURCE_EXHAUSTED: Error writing \"a/0.0\" in OCDBT database: Failed to write 7204 bytes to file 4: No space left "
               "on device [os_error_code='28']"),
])
def test_a_full_disk_is_called_one(tmp_path, monkeypatch, error):
    def save_nothing(*arguments, **options):
        raise error

    monkeypatch.setattr(orbax.CheckpointManager, "save", save_nothing)
    with pytest.raises(UserError, match=r"could not be written \(No space left on device; \d+ MiB are free\)"):
        save(tmp_path, 4)


def test_a_defect_while_saving_keeps_its_traceback(tmp_path):
    with pytest.raises(AttributeError), _disk_errors(tmp_path):
        raise AttributeError("a defect")


def truncate(path: pathlib.Path):
    path.write_bytes(path.read_bytes()[:path.stat().st_size // 2])


# Orbax leaves what it was reading besides unfinished.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", [truncate, pathlib.Path.unlink])
@pytest.mark.parametrize("file", ["meta/metadata", "theta/manifest.ocdbt", "rest/d/*", "theta/ocdbt.process_0/d/*"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_takes_its_place(tmp_path, file, damage):
    """A truncated or missing file never becomes wrong weights."""
    save(tmp_path, 4, 8)
    damaged = tmp_path / "checkpoints" / "8"
    damage(max(damaged.glob(file), key=lambda path: path.stat().st_size))
    with pytest.raises(UserError, match=f"{damaged}: the checkpoint cannot be read .*move it away to go on from the one before"):
        restore(tmp_path)
    gc.collect()  # while the warning about it is ignored
    damaged.rename(tmp_path / "damaged")
    assert_equal(restore(tmp_path).state, state_of(4))


def test_meta_of_something_else_is_a_damaged_checkpoint(tmp_path):
    save(tmp_path, 4)
    (tmp_path / "checkpoints" / "4" / "meta" / "metadata").write_text(json.dumps({"model": "tiny"}))
    with pytest.raises(UserError, match="checkpoints/4: the checkpoint cannot be read"):
        restore(tmp_path)
