"""What tests of checkpoints share: a small training state, and saving and restoring it."""

from __future__ import annotations

import contextlib
import pathlib
import resource

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lingvo_moe import tree
from lingvo_moe.sharding.layout import DeviceMesh, Layout, Spec
from lingvo_moe.training.checkpoint import Checkpoints, Saved

SPECS = {
    "step": Spec((), "int32", ""),
    "seed": Spec((2,), "int32", "s"),
    "theta": {"embedding": Spec((16, 8), "float32", "VM"), "expert": {"inner": Spec((4, 8, 16), "float32", "EMH")}},
    "optimizer_state": {"embedding": {"row": Spec((16,), "float32", "V")}},
}
# The same with an expert for each of eight devices.
WIDE = SPECS | {"theta": SPECS["theta"] | {"expert": {"inner": Spec((8, 8, 16), "float32", "EMH")}}}
ONE = DeviceMesh((1,))


def shardings(specs: dict, mesh: DeviceMesh) -> dict:
    """Where the layout of a mesh puts these specs."""
    devices = Mesh(np.array(jax.devices()[: mesh.size]).reshape(mesh.shape), mesh.axis_names)
    layout = Layout.of(mesh)
    return tree.map_leaves(
        lambda spec: NamedSharding(devices, PartitionSpec(*layout.mesh_axes(spec.logical_axes))), specs
    )


def values_of(step: int, specs: dict = SPECS) -> dict:
    """A state with other random values at every step and in every leaf, as numpy arrays."""
    random = np.random.RandomState(step)
    return tree.map_leaves(lambda spec: random.normal(size=spec.shape).astype(spec.dtype), specs) | {
        "step": np.int32(step)
    }


def state_of(step: int, specs: dict = SPECS, mesh: DeviceMesh = ONE) -> dict:
    """`values_of`, distributed."""
    return tree.map_leaves(jax.device_put, values_of(step, specs), shardings(specs, mesh))


def save(logdir: pathlib.Path, *steps: int, keep: int = 9):
    """Saves the states of these steps."""
    checkpoints = Checkpoints(logdir, keep)
    for step in steps:
        checkpoints.save("tiny", state_of(step), {"next": step})
    checkpoints.close()


def restore(logdir: pathlib.Path) -> Saved:
    """Restores as a process that reads alone."""
    return Checkpoints(logdir).restore("tiny", SPECS, shardings(SPECS, ONE))


def assert_equal(found: dict, expected: dict):
    """The trees have the same paths and values."""
    found, expected = tree.flatten(found), tree.flatten(expected)
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(np.asarray(found[path]), np.asarray(value), err_msg=path)


def names(logdir: pathlib.Path) -> set[str]:
    """What is in the directory of checkpoints."""
    return {path.name for path in (logdir / "checkpoints").iterdir()}


def flip(path: pathlib.Path, bit: int | None = None):
    """Turns one bit of a file around: the bit of this number, or one in the middle."""
    content = bytearray(path.read_bytes())
    bit = len(content) * 4 if bit is None else bit
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def truncate(path: pathlib.Path):
    """Leaves the first half of a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@contextlib.contextmanager
def files_up_to(size: int):
    """The kernel refuses to let any file of this process grow beyond `size` bytes, in whichever thread and language."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
