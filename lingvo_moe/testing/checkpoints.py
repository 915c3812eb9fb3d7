"""Helpers for tests of checkpoints: a small training state, saving and restoring it, and corrupting what was saved."""

from __future__ import annotations

import contextlib
import os
import pathlib
import resource

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lingvo_moe import tree
from lingvo_moe.sharding.layout import DeviceMesh, Layout, Spec
from lingvo_moe.training.checkpoint import Checkpoints, Restored
from lingvo_moe.training.checkpoint_manifest import write_manifest

SPECS = {
    "step": Spec((), "int32", ""),
    "seed": Spec((2,), "int32", "s"),
    "theta": {"embedding": Spec((16, 8), "float32", "VM"), "expert": {"inner": Spec((4, 8, 16), "float32", "EMH")}},
    "optimizer_state": {"embedding": {"row": Spec((16,), "float32", "V")}},
}
# The same with one expert for each of eight devices. A shard has 4 KiB: values below 1 KiB are moved from the files of
# the process that wrote them to OCDBT's index.
WIDE = SPECS | {"theta": SPECS["theta"] | {"expert": {"inner": Spec((8, 8, 128), "float32", "EMH")}}}
ONE = DeviceMesh((1,))
_DATA_FILE_BYTES = 2**31


def shardings(specs: dict, mesh: DeviceMesh) -> dict:
    """Returns the shardings that the layout of a mesh gives these specs."""
    devices = Mesh(np.array(jax.devices()[: mesh.size]).reshape(mesh.shape), mesh.axis_names)
    layout = Layout.of(mesh)
    return tree.map_leaves(
        lambda spec: NamedSharding(devices, PartitionSpec(*layout.mesh_axes(spec.logical_axes))), specs
    )


def values_of(step: int, specs: dict = SPECS) -> dict:
    """Returns a state of numpy arrays whose random values differ from step to step and from leaf to leaf."""
    random = np.random.RandomState(step)
    return tree.map_leaves(lambda spec: random.normal(size=spec.shape).astype(spec.dtype), specs) | {
        "step": np.int32(step)
    }


def state_of(step: int, specs: dict = SPECS, mesh: DeviceMesh = ONE) -> dict:
    """Returns `values_of` as JAX arrays with the shardings of a mesh."""
    return tree.map_leaves(jax.device_put, values_of(step, specs), shardings(specs, mesh))


def save(logdir: pathlib.Path, *steps: int, keep: int = 9) -> Checkpoints:
    """Saves the states of these steps, and returns them to be read."""
    checkpoints = Checkpoints(logdir, keep)
    for step in steps:
        checkpoints.save("tiny", state_of(step), {"next": step})
    checkpoints.close()
    return Checkpoints(logdir)


def restore(logdir: pathlib.Path) -> Restored:
    """Restores in a process that only reads."""
    return Checkpoints(logdir).restore("tiny", SPECS, shardings(SPECS, ONE))


def theta_of(step: int) -> dict[str, np.ndarray]:
    """Returns the weights of `values_of` by path."""
    return tree.flatten(values_of(step)["theta"])


def restore_theta(logdir: pathlib.Path) -> tuple[int, dict]:
    """Restores the newest step and its weights."""
    return Checkpoints(logdir).restore_theta("tiny", SPECS["theta"], shardings(SPECS, ONE)["theta"])


def assert_equal(found: dict, expected: dict):
    """Asserts that two trees have the same paths and values."""
    found, expected = tree.flatten(found), tree.flatten(expected)
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(np.asarray(found[path]), np.asarray(value), err_msg=path)


def names(logdir: pathlib.Path) -> set[str]:
    """Returns the names in the directory of checkpoints."""
    return {path.name for path in (logdir / "checkpoints").iterdir()}


def flip(path: pathlib.Path, bit: int | None = None):
    """Flips one bit of a file: the one with this number, or one in the middle."""
    content = bytearray(path.read_bytes())
    bit = len(content) * 4 if bit is None else bit
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def largest(directory: pathlib.Path, pattern: str = "**/*") -> pathlib.Path:
    """Returns the largest file below a directory."""
    return max((path for path in directory.glob(pattern) if path.is_file()), key=lambda path: path.stat().st_size)


def truncate(path: pathlib.Path):
    """Cuts a file to its first half."""
    os.truncate(path, path.stat().st_size // 2)


def make_sparse(logdir: pathlib.Path, step: int, size: int, processes: int = 8):
    """Makes a checkpoint of about `size` bytes: a small one, and sparse data files of 2 GiB as OCDBT writes them.

    Its files and sizes are those of a large checkpoint, so it can be checked but not restored.

    Args:
      logdir: the log directory.
      step: the number of the checkpoint.
      size: in bytes.
      processes: over how many processes' directories the files are distributed.
    """
    save(logdir, step)
    directory = logdir / "checkpoints" / str(step)
    for number, start in enumerate(range(0, size, _DATA_FILE_BYTES)):
        item = "rest" if number % 3 else "theta"  # Adam's two moments for each weight
        data = directory / item / f"ocdbt.process_{number % processes}" / "d"
        data.mkdir(parents=True, exist_ok=True)
        with open(data / f"{number:032x}", "wb") as file:
            file.truncate(min(_DATA_FILE_BYTES, size - start))
    write_manifest(directory, len(tree.flatten(SPECS)))


def bytes_read() -> int:
    """Returns how many bytes this process has asked the kernel to read from files, cached ones included."""
    counters = dict(line.split(": ") for line in pathlib.Path("/proc/self/io").read_text().splitlines())
    return int(counters["rchar"])


@contextlib.contextmanager
def files_up_to(size: int):
    """Within it, no file of this process may grow beyond `size` bytes, whichever thread or library writes it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
