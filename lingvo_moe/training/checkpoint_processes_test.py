"""Checkpoints of two processes: round trips to and from one process, and falling back from a corrupt one together."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

from lingvo_moe.sharding.layout import DeviceMesh
from lingvo_moe.testing.checkpoints import ONE, WIDE, assert_equal, flip, largest, shardings, state_of, values_of
from lingvo_moe.training.checkpoint import Checkpoints
from lingvo_moe.utils import free_ports

pytestmark = pytest.mark.slow

# One of two processes, with four of eight devices. It restores, compares its shards with the values of that step, and
# saves the state of another step, without hashes of data files, as if each were larger than those that are hashed.
_MEMBER = """
import sys
import numpy as np
from lingvo_moe import tree
from lingvo_moe.distributed import jax_runtime
from lingvo_moe.distributed.membership import Membership
from lingvo_moe.engines.pjrt import Engine
from lingvo_moe.sharding.layout import DeviceMesh
from lingvo_moe.testing.checkpoints import WIDE, shardings, state_of, values_of
from lingvo_moe.training import checkpoint_manifest
from lingvo_moe.training.checkpoint import Checkpoints
coordinator, index, logdir, mesh, following = sys.argv[1:]
checkpoint_manifest._SMALL_BYTES = -1
with jax_runtime.join(Membership(2, int(index), coordinator), "cpu") as run:
    Engine(8, "cpu", processes=2)
    mesh, checkpoints = DeviceMesh.parse(mesh), Checkpoints(logdir, 9, run)
    newest = checkpoints.latest()
    saved = checkpoints.restore("tiny", WIDE, shardings(WIDE, mesh))
    expected = tree.flatten(values_of(saved.step, WIDE))
    for path, leaf in tree.flatten(saved.state).items():
        assert len(leaf.addressable_shards) == 4
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(shard.data, expected[path][shard.index], err_msg=path)
    checkpoints.save("tiny", state_of(int(following), WIDE, mesh), {"next": int(following)})
    checkpoints.close()
    run.finish()
print("newest", newest, "restored", saved.step, saved.data_state["next"])
"""


def _two_processes(logdir: pathlib.Path, mesh: str, following: int) -> list[tuple[str, str]]:
    """Returns (output, errors) of two processes that restore on `mesh` and save the state of step `following`."""
    coordinator = free_ports.address()
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _MEMBER, coordinator, str(index), logdir, mesh, str(following)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for index in (0, 1)
    ]
    ended = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0, 0], ended
    return ended


@pytest.mark.parametrize(("one_process", "two_processes"), [("8", "4x2"), ("4x2", "8")])
def test_round_trip_and_fallback(tmp_path, one_process, two_processes):
    """Values are equal on any mesh. A corrupt shard that one process reads, or a lost file, makes both fall back."""
    alone = Checkpoints(tmp_path, 9)
    alone.save("tiny", state_of(4, WIDE, DeviceMesh.parse(one_process)), {"next": 4})
    alone.close()
    for output, _ in _two_processes(tmp_path, two_processes, following=8):
        assert output.endswith("newest 4 restored 4 4\n")
    for mesh in (ONE, DeviceMesh((2,)), DeviceMesh((8,)), DeviceMesh((4, 2))):
        saved = Checkpoints(tmp_path).restore("tiny", WIDE, shardings(WIDE, mesh))
        assert (saved.step, saved.data_state) == (8, {"next": 8})
        assert_equal(saved.state, values_of(8, WIDE))
    newest = tmp_path / "checkpoints" / "8"
    flip(largest(newest, "theta/ocdbt.process_1/d/*"))
    ended = _two_processes(tmp_path, two_processes, following=12)
    assert all(output.endswith("newest 8 restored 4 4\n") for output, _ in ended), ended
    assert re.search(r'checkpoints/8 is corrupt: .*Error reading "[\w.]+/c/', ended[0][1]), ended
    assert "is corrupt" not in ended[1][1], "the primary process logs for all"
    assert (newest.parent / "8.corrupt").is_dir() and not newest.exists()
    assert_equal(Checkpoints(tmp_path).restore("tiny", WIDE, shardings(WIDE, ONE)).state, values_of(12, WIDE))
    largest(tmp_path / "checkpoints" / "12", "theta/ocdbt.process_1/d/*").unlink()
    for output, _ in _two_processes(tmp_path, two_processes, following=16):
        assert output.endswith("newest 4 restored 4 4\n")
