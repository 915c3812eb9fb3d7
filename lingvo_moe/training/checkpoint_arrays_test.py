"""Arrays in checkpoints: shards of any engine are written and read alike, within the host's memory."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import weakref

import jax
import numpy as np
import pytest
from orbax import checkpoint as orbax

from lingvo_moe import experiment, tree
from lingvo_moe.engines.tpu_strategy import Training
from lingvo_moe.engines.tpu_strategy_variables import ShardedVariable, TensorSharding
from lingvo_moe.errors import UserError
from lingvo_moe.sharding.layout import DeviceMesh, Layout, Spec
from lingvo_moe.testing import local_tpu
from lingvo_moe.testing.checkpoints import ONE, WIDE, assert_equal, names, shardings, state_of
from lingvo_moe.training import checkpoint_arrays
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
            path: ShardedVariable(TensorSharding(spec, EIGHT), ["/device:CPU:0"] * 8, path)
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


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["8", "4x2"])
def test_round_trip_between_engines(tmp_path, mesh):
    """Bit for bit: PJRT on eight devices, TPUStrategy on eight cores, PJRT on 1, 8 and 4x2."""
    eight_cores = training(mesh)
    specs = eight_cores._steps.state_specs()
    state = state_of(7, specs, DeviceMesh.parse(mesh))
    save(tmp_path / "pjrt", state)
    restored = Checkpoints(tmp_path / "pjrt").restore("tiny", specs, eight_cores.shardings, eight_cores.load)
    assert (restored.step, restored.data_state) == (7, {"next": 70})
    assert_equal(eight_cores.state, state)
    save(tmp_path / "tpu", eight_cores.state)
    for devices in (ONE, DeviceMesh((8,)), DeviceMesh((4, 2))):
        found = Checkpoints(tmp_path / "tpu").restore("tiny", specs, shardings(specs, devices))
        assert (found.step, found.data_state) == (7, {"next": 70})
        assert_equal(found.state, state)


@pytest.mark.slow
def test_round_trip_between_meshes_of_a_slice(tmp_path):
    """Bit for bit: from one device to a slice, and from one mesh of its cores to another."""
    specs = training("8")._steps.state_specs()
    state = state_of(7, specs, ONE)
    save(tmp_path / "0", state)
    for number, mesh in enumerate(("8", "4x2", "8")):
        cores = training(mesh)
        Checkpoints(tmp_path / str(number)).restore("tiny", specs, None, cores.load)
        assert_equal(cores.state, state)
        save(tmp_path / str(number + 1), cores.state)
    _, theta = Checkpoints(tmp_path / "3").restore_theta("tiny", specs["theta"], shardings(specs, ONE)["theta"])
    assert_equal(theta, state["theta"])


def test_format_does_not_depend_on_the_engine(tmp_path):
    """Shards of variables and JAX arrays have the same paths, manifest and metadata."""
    state = variables()
    load(state, state_of(3, SPECS))
    save(tmp_path / "variables", state)
    save(tmp_path / "arrays", state_of(3, SPECS, DeviceMesh((8,))))
    shards, arrays = (Reader(tmp_path / kind / "checkpoints" / "3") for kind in ("variables", "arrays"))
    assert shards.specs() == arrays.specs() and shards.meta == arrays.meta and shards.items == arrays.items
    assert shards.problems(finite=True) == [] and Checkpoints(tmp_path / "variables").problems(3) == []
    for path in shards.specs():
        np.testing.assert_array_equal(shards.read(path), arrays.read(path), err_msg=path)


def test_variable_may_change_after_save(tmp_path):
    """Nothing was copied, so everything is in files when `save` returns."""
    state, checkpoints = variables(), Checkpoints(tmp_path, keep=1)
    load(state, state_of(1, SPECS))
    checkpoints.save("tiny", state, None)
    load(state, state_of(2, SPECS))
    checkpoints.close()
    assert_equal(Checkpoints(tmp_path).restore("tiny", SPECS, shardings(SPECS, ONE)).state, state_of(1, SPECS))


class Counted(ShardedVariable):
    """A variable that counts how many bytes of its shards are on the host."""

    def shards(self):
        self.now = self.most = 0
        for index, value in super().shards():
            shard = np.array(value)
            self._count(shard.nbytes)
            weakref.finalize(shard, self._count, -shard.nbytes)
            yield index, shard

    def _count(self, change: int):
        self.now += change
        self.most = max(self.most, self.now)


def test_host_memory_is_bounded(tmp_path, monkeypatch):
    """If two shards of eight are allowed, writing holds no more, and reading one reads no other."""
    shard = 16 * 64 * 4
    spec = Spec((8, 16, 64), "float32", "EMH")
    specs = {**SPECS, "theta": {"expert": spec}}
    state = variables(specs)
    state["theta"]["expert"] = Counted(TensorSharding(spec, EIGHT), ["/device:CPU:0"] * 8, "expert")
    load(state, state_of(1, specs))
    monkeypatch.setattr(checkpoint_arrays, "_MAX_BYTES_IN_FLIGHT", 2 * shard)
    save(tmp_path, state)
    assert shard <= state["theta"]["expert"].most <= 3 * shard, "two, and the one that is being copied"
    stored = Checkpoints(tmp_path).restore("tiny", specs, None).state["theta"]["expert"]
    assert stored._store.chunk_layout.read_chunk.shape == (1, 16, 64)
    np.testing.assert_array_equal(stored[2:3, :, :], np.asarray(state["theta"]["expert"])[2:3])


def test_little_is_read_at_a_time(tmp_path, monkeypatch):
    """Orbax would hold all weights twice or more on the host, so that a model of half the memory could not be used."""
    limits, made = [], orbax.StandardCheckpointHandler

    def handler(restore_concurrent_gb: int) -> orbax.StandardCheckpointHandler:
        limits.append(restore_concurrent_gb)
        return made(restore_concurrent_gb=restore_concurrent_gb)

    monkeypatch.setattr(orbax, "StandardCheckpointHandler", handler)
    save(tmp_path, state_of(1, SPECS))
    restored = Checkpoints(tmp_path).restore("tiny", SPECS, shardings(SPECS, ONE))
    assert_equal(restored.state, state_of(1, SPECS))
    assert limits == [1, 1]  # of the weights, and of the rest
    large = {"w": Spec((1000, 1000, 1000), "float32", "")}
    on_one = {"w": jax.sharding.SingleDeviceSharding(jax.devices()[0])}
    checkpoint_arrays.devices_handler(checkpoint_arrays.restore_on_devices(large, on_one))
    assert limits[2:] == [5]  # Orbax refuses an array of 4 GB if the limit is 4.


@pytest.mark.parametrize("limit, chunk", [(2**26, [8, 8, 128]), (2**12, [8, 8, 16])])
def test_a_large_shard_is_stored_in_chunks(tmp_path, monkeypatch, limit, chunk):
    """Who reads a part of it, such as one of eight devices, does not hold all of its bytes beside it."""
    monkeypatch.setattr(checkpoint_arrays, "_CHUNK_BYTES", limit)
    state = state_of(4, WIDE)
    save(tmp_path, state)
    checkpoints = Checkpoints(tmp_path)
    stored = orbax.Checkpointer(orbax.PyTreeCheckpointHandler()).metadata(checkpoints.path(4) / "theta")
    assert list(stored.item_metadata.tree["expert"]["inner"].storage.chunk_shape) == chunk
    found = checkpoints.restore("tiny", WIDE, shardings(WIDE, DeviceMesh((8,))))
    assert_equal(found.state, state)


def test_retention_and_fallback_of_variables(tmp_path, caplog):
    """As for JAX arrays."""
    state = variables()
    for step in (4, 8, 12):
        load(state, state_of(step, SPECS))
        save(tmp_path, state, keep=2)
    assert names(tmp_path) == {"8", "12"}
    shutil.rmtree(tmp_path / "checkpoints" / "12" / "rest")
    checkpoints = Checkpoints(tmp_path, keep=2)
    saved = checkpoints.restore("tiny", SPECS, None, lambda values: load(state, values))
    assert saved.step == 8 and "12 is corrupt" in caplog.text
    assert_equal(state, state_of(8, SPECS))


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 600])
def test_save_refused_by_the_file_system(tmp_path, size):
    """One error, and older checkpoints stay. In a process of its own, whose files may not grow beyond `size` bytes."""
    state = variables()
    load(state, state_of(4, SPECS))
    save(tmp_path, state)
    code = (
        "import pathlib, sys\nfrom lingvo_moe.cli import app\n"
        "from lingvo_moe.training import checkpoint_arrays_test as test\n"
        "from lingvo_moe.testing.checkpoints import files_up_to\n"
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


def test_stored_array_whose_files_are_gone(tmp_path):
    """The disk went away between opening and reading: an error that names the array."""
    state = variables()
    load(state, state_of(1, SPECS))
    save(tmp_path, state)
    stored = Checkpoints(tmp_path).restore("tiny", SPECS, None).state["theta"]["embedding"]
    shutil.rmtree(tmp_path)
    with pytest.raises(UserError, match="embedding of the checkpoint can no longer be read"):
        np.asarray(stored[0:8, 0:64])


def test_state_of_another_model_is_refused(tmp_path):
    """As for JAX arrays."""
    state = variables()
    load(state, state_of(1, SPECS))
    save(tmp_path, state)
    other = {**SPECS, "theta": SPECS["theta"] | {"bias": Spec((8,), "float32", "M")}}
    with pytest.raises(UserError, match=r"bias is absent there, \[8\] here"):
        Checkpoints(tmp_path).restore("other", other, None)


@pytest.mark.parametrize("mesh", ["1", "8", "4x2"])
def test_each_element_is_written_once(mesh):
    """Whatever part of an array has copies on other devices, whichever process writes it."""
    state = state_of(1, WIDE, DeviceMesh.parse(mesh))
    for path, shards in tree.flatten(checkpoint_arrays.save_arguments(state).item).items():
        written = np.zeros(shards.shape, int)
        for index, shard in shards.shards():
            written[index] += 1
            np.testing.assert_array_equal(shard, np.asarray(tree.flatten(state)[path])[index])
        assert np.all(written == 1), path
