"""A state that is nowhere whole goes into checkpoints and comes out of them part by part, and either engine reads either's."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import weakref

import numpy as np
import pytest

from lingvo_moe import experiment, tree
from lingvo_moe.engines.tpu_strategy import Training
from lingvo_moe.engines.tpu_strategy_variables import Placement, ShardedVariable
from lingvo_moe.errors import UserError
from lingvo_moe.sharding.layout import DeviceMesh, Layout, Spec
from lingvo_moe.testing import local_tpu
from lingvo_moe.testing.checkpoints import ONE, assert_equal, names, shardings, state_of
from lingvo_moe.training import sharded_checkpoint
from lingvo_moe.training.checkpoint import Checkpoints
from lingvo_moe.training.checkpoint_reader import Reader

SMALL = ("source_vocabulary=64", "target_vocabulary=64", "model_dim=32", "num_experts=8", "num_groups=8")
EIGHT = Layout.of(DeviceMesh((8,)))
SPECS = {
    "step": Spec((), "int32", ""),
    "theta": {"embedding": Spec((64, 64), "float32", "VM"), "expert": {"inner": Spec((8, 8, 16), "float32", "EMH")}},
}


def training(mesh: str, *changes: str) -> Training:
    """The Quickstart model's on eight cores."""
    config = experiment.get("m4.Quickstart", [*SMALL, *changes], DeviceMesh.parse(mesh))
    return local_tpu.engine().training(config.steps, config.batch_specs())


def variables(specs: dict = SPECS) -> dict:
    """A state of variables on eight cores, without values."""
    return tree.unflatten(
        {
            path: ShardedVariable(Placement(spec, EIGHT), ["/device:CPU:0"] * 8, path)
            for path, spec in tree.flatten(specs).items()
        }
    )


def save(logdir: pathlib.Path, state: dict, keep: int = 1):
    checkpoints = Checkpoints(logdir, keep)
    checkpoints.save("tiny", state, {"next": 70})
    checkpoints.close()


def load(state: dict, values: dict):
    """Loads each variable of a tree."""
    for path, variable in tree.flatten(state).items():
        variable.load(tree.flatten(values)[path])


@pytest.mark.parametrize("mesh", ["8", "4x2"])
def test_a_state_goes_from_eight_devices_to_a_slice_and_on_to_one_device_bit_for_bit(tmp_path, mesh):
    """PJRT on eight devices, TPUStrategy on eight cores, PJRT on one, on eight, and on four by two."""
    slice_of_eight = training(mesh)
    specs = slice_of_eight._steps.state_specs()
    state = state_of(7, specs, DeviceMesh.parse(mesh))
    save(tmp_path / "pjrt", state)
    restored = Checkpoints(tmp_path / "pjrt").restore("tiny", specs, slice_of_eight.shardings)
    assert (restored.step, restored.data_state) == (7, {"next": 70})
    slice_of_eight.load(restored.state)
    assert_equal(slice_of_eight.state, state)
    save(tmp_path / "tpu", slice_of_eight.state)
    for devices in (ONE, DeviceMesh((8,)), DeviceMesh((4, 2))):
        found = Checkpoints(tmp_path / "tpu").restore("tiny", specs, shardings(specs, devices))
        assert (found.step, found.data_state) == (7, {"next": 70})
        assert_equal(found.state, state)


def test_a_state_goes_from_one_device_to_a_slice_and_from_a_slice_to_another_mesh_bit_for_bit(tmp_path):
    """As when a model that was tried on one device is trained on a slice, and its cores are arranged anew."""
    specs = training("8")._steps.state_specs()
    state = state_of(7, specs, ONE)
    save(tmp_path / "0", state)
    for number, mesh in enumerate(("8", "4x2", "8")):
        there = training(mesh)
        there.load(Checkpoints(tmp_path / str(number)).restore("tiny", specs, None).state)
        save(tmp_path / str(number + 1), there.state)
    assert_equal(there.state, state)
    _, theta = Checkpoints(tmp_path / "3").restore_theta("tiny", specs["theta"], shardings(specs, ONE)["theta"])
    assert_equal(theta, state["theta"])


def test_what_is_on_disk_is_what_arrays_would_leave(tmp_path):
    """Named, counted, sealed and verified alike; a chunk is the part of one core."""
    state = variables()
    load(state, state_of(3, SPECS))
    save(tmp_path / "parts", state)
    save(tmp_path / "arrays", state_of(3, SPECS, DeviceMesh((8,))))
    parts, arrays = (Reader(tmp_path / kind / "checkpoints" / "3") for kind in ("parts", "arrays"))
    assert parts.specs() == arrays.specs() and parts.meta == arrays.meta and parts.items == arrays.items
    assert parts.problems(finite=True) == [] and Checkpoints(tmp_path / "parts").problems(3) == []
    for path in parts.specs():
        np.testing.assert_array_equal(parts.read(path), arrays.read(path), err_msg=path)


def test_a_variable_may_change_as_soon_as_it_is_saved(tmp_path):
    """Nothing was copied, so all is in files when `save` returns."""
    state, checkpoints = variables(), Checkpoints(tmp_path, keep=1)
    load(state, state_of(1, SPECS))
    checkpoints.save("tiny", state, None)
    load(state, state_of(2, SPECS))
    checkpoints.close()
    assert_equal(Checkpoints(tmp_path).restore("tiny", SPECS, shardings(SPECS, ONE)).state, state_of(1, SPECS))


class Counted(ShardedVariable):
    """A variable that counts how many bytes of its parts are on the host."""

    def shards(self):
        self.now = self.most = 0
        for where, part in super().shards():
            part = np.array(part)
            self._count(part.nbytes)
            weakref.finalize(part, self._count, -part.nbytes)
            yield where, part

    def _count(self, change: int):
        self.now += change
        self.most = max(self.most, self.now)


def test_the_host_never_holds_a_distributed_weight_whole(tmp_path, monkeypatch):
    """Room for two parts of eight: on the way out no more are there, on the way in one is read at a time."""
    part = 16 * 64 * 4
    spec = Spec((8, 16, 64), "float32", "EMH")
    specs = {**SPECS, "theta": {"expert": spec}}
    state = variables(specs)
    state["theta"]["expert"] = Counted(Placement(spec, EIGHT), ["/device:CPU:0"] * 8, "expert")
    load(state, state_of(1, specs))
    monkeypatch.setattr(sharded_checkpoint, "_ON_THE_WAY", 2 * part)
    save(tmp_path, state)
    assert part <= state["theta"]["expert"].most <= 3 * part, "and the one that is being read"
    stored = Checkpoints(tmp_path).restore("tiny", specs, None).state["theta"]["expert"]
    assert stored._store.chunk_layout.read_chunk.shape == (1, 16, 64)
    np.testing.assert_array_equal(stored[2:3, :, :], np.asarray(state["theta"]["expert"])[2:3])


def test_keeping_the_newest_ones_and_setting_damaged_ones_aside_work_as_for_arrays(tmp_path, capsys):
    state = variables()
    for step in (4, 8, 12):
        load(state, state_of(step, SPECS))
        save(tmp_path, state, keep=2)
    assert names(tmp_path) == {"8", "12"}
    shutil.rmtree(tmp_path / "checkpoints" / "12" / "rest")
    checkpoints = Checkpoints(tmp_path, keep=2)
    saved = checkpoints.restore("tiny", SPECS, None)
    assert saved.step == 8 and "12 is damaged" in capsys.readouterr().err
    load(state, saved.state)
    assert_equal(state, state_of(8, SPECS))


@pytest.mark.parametrize("size", [0, 600])
def test_a_save_that_the_file_system_refuses_is_told_and_costs_no_older_checkpoint(tmp_path, size):
    """In a process of its own, whose threads end with it: no file of it may grow beyond `size` bytes."""
    state = variables()
    load(state, state_of(4, SPECS))
    save(tmp_path, state)
    code = (
        "import pathlib, sys\nfrom lingvo_moe.cli import app\nfrom lingvo_moe.training import sharded_checkpoint_test as test\n"
        "from lingvo_moe.training.checkpoint_testing import files_up_to\n"
        "def main(arguments):\n    state = test.variables()\n    test.load(state, test.state_of(8, test.SPECS))\n"
        "    with files_up_to(int(arguments[2])):\n        test.save(pathlib.Path(arguments[1]), state)\napp.run(main)"
    )
    refused = subprocess.run(
        [sys.executable, "-c", code, tmp_path, str(size)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert refused.returncode == 2 and re.search(
        r"^error: .*could not be written \(File too large; ", refused.stderr, re.MULTILINE
    ), refused.stderr
    assert_equal(Checkpoints(tmp_path).restore("tiny", SPECS, shardings(SPECS, ONE)).state, state_of(4, SPECS))


def test_what_can_no_longer_be_read_is_told(tmp_path):
    """The disk went away between opening and reading."""
    state = variables()
    load(state, state_of(1, SPECS))
    save(tmp_path, state)
    stored = Checkpoints(tmp_path).restore("tiny", SPECS, None).state["theta"]["embedding"]
    shutil.rmtree(tmp_path)
    with pytest.raises(UserError, match="embedding of the checkpoint cannot be read any more"):
        np.asarray(stored[0:8, 0:64])


def test_a_state_of_another_model_is_refused(tmp_path):
    state = variables()
    load(state, state_of(1, SPECS))
    save(tmp_path, state)
    other = {**SPECS, "theta": SPECS["theta"] | {"bias": Spec((8,), "float32", "M")}}
    with pytest.raises(UserError, match=r"bias is absent there, \[8\] here"):
        Checkpoints(tmp_path).restore("other", other, None)
