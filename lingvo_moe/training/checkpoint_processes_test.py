"""A checkpoint goes from one process to two and back, on any mesh, value for value; all pass over a damaged one."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys

import pytest

from lingvo_moe.sharding.layout import DeviceMesh
from lingvo_moe.testing.checkpoints import ONE, WIDE, assert_equal, flip, shardings, state_of, values_of
from lingvo_moe.training.checkpoint import Checkpoints

pytestmark = pytest.mark.slow

# Four devices of eight. Restores, compares its own parts with those that the step's values have there, and saves
# another state.
_MEMBER = """
import sys
import numpy as np
from lingvo_moe import tree
from lingvo_moe.distributed import jax_runtime
from lingvo_moe.distributed.membership import Membership
from lingvo_moe.engines.pjrt import Engine
from lingvo_moe.sharding.layout import DeviceMesh
from lingvo_moe.testing.checkpoints import WIDE, shardings, state_of, values_of
from lingvo_moe.training.checkpoint import Checkpoints
coordinator, index, logdir, mesh, following = sys.argv[1:]
with jax_runtime.join(Membership(2, int(index), coordinator), 'cpu') as run:
    Engine(8, "cpu", processes=2)
    mesh, checkpoints = DeviceMesh.parse(mesh), Checkpoints(logdir, 9, run)
    checkpoints.latest()
    saved = checkpoints.restore("tiny", WIDE, shardings(WIDE, mesh))
    expected = tree.flatten(values_of(saved.step, WIDE))
    for path, leaf in tree.flatten(saved.state).items():
        assert len(leaf.addressable_shards) == 4
        for part in leaf.addressable_shards:
            np.testing.assert_array_equal(part.data, expected[path][part.index], err_msg=path)
    checkpoints.save("tiny", state_of(int(following), WIDE, mesh), {"next": int(following)})
    checkpoints.close()
    run.finish()
print("restored", saved.step, saved.data_state["next"])
"""


def _two(logdir: pathlib.Path, mesh: str, following: int) -> list[tuple[str, str]]:
    """(output, errors) of two processes that restore on `mesh`, and save the state of the step `following`."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
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
def test_from_one_process_to_two_and_back_and_over_a_damaged_one(tmp_path, one_process, two_processes):
    alone = Checkpoints(tmp_path, 9)
    alone.save("tiny", state_of(4, WIDE, DeviceMesh.parse(one_process)), {"next": 4})
    alone.close()
    for output, _ in _two(tmp_path, two_processes, following=8):
        assert output.endswith("restored 4 4\n")
    for mesh in (ONE, DeviceMesh((2,)), DeviceMesh((8,)), DeviceMesh((4, 2))):
        saved = Checkpoints(tmp_path).restore("tiny", WIDE, shardings(WIDE, mesh))
        assert (saved.step, saved.data_state) == (8, {"next": 8})
        assert_equal(saved.state, values_of(8, WIDE))
    files = [path for path in Checkpoints(tmp_path).path(8).rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    flip(largest)
    ended = _two(tmp_path, two_processes, following=12)
    for output, _ in ended:
        assert output.endswith("restored 4 4\n"), ended
    assert "checkpoints/8" in ended[0][1] and largest.name in ended[0][1], (
        "the first process says what is wrong with it"
    )
    assert_equal(Checkpoints(tmp_path).restore("tiny", WIDE, shardings(WIDE, ONE)).state, values_of(12, WIDE))
