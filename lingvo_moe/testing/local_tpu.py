"""What tests of the TPUStrategy engine share: a slice of 8 cores that all are this machine's CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lingvo_moe.engines import tpu_strategy_graph
from lingvo_moe.engines.tpu_strategy import Engine, Training
from lingvo_moe.engines.tpu_strategy_variables import Placement, ShardedVariable
from lingvo_moe.lazy import tf
from lingvo_moe.sharding import spmd

CHIPS = (2, 2, 1)  # of 8 cores


def engine() -> Engine:
    """The engine of such a slice: every core has its own variables, of its own parts, and they can be read."""
    made = tpu_strategy_graph.stand_in(CHIPS)
    made.devices = made.hosts = ["/device:CPU:0"] * len(made.devices)
    return made


def run_programs_here(patch: pytest.MonkeyPatch):
    """Makes engines of this process run programs, on a mesh with one axis.

    TensorFlow's XLA compiles each as one computation for one device. All of `Training` is as on a TPU, except for what only a
    TPU has: the operators that show the parts of all cores to a program as one tensor, and the one that runs it on all cores.
    """
    patch.setattr(Training, "_run", _run)
    patch.setattr(Placement, "join", _joined)
    patch.setattr(ShardedVariable, "handle", lambda self: None)
    patch.setattr(ShardedVariable, "read", _read)
    patch.setattr(ShardedVariable, "write", _write)


def _run(training: Training, program: Callable, leaves: dict[str, ShardedVariable], argument: Any) -> Any:
    handles = {path: variable.handle() for path, variable in leaves.items()}
    compiled = tf.function(lambda argument: program(handles, argument), jit_compile=True, autograph=False)
    with spmd.num_devices(len(training._engine.devices)):
        return compiled(argument)


def _joined(placement: Placement, parts: Sequence[tf.Tensor]) -> tf.Tensor:
    """Parts in row-major order, put together along the last dimension, then along the one before it."""
    for axis, count in reversed(list(enumerate(placement.partition_dims))):
        parts = [tf.concat(parts[first : first + count], axis) for first in range(0, len(parts), count)]
    return parts[0]


def _read(variable: ShardedVariable, handle: None) -> tf.Tensor:
    return _joined(variable.placement, [part.read_value() for part in variable._variables])


def _write(variable: ShardedVariable, handle: None, value: tf.Tensor):
    for where, part in zip(variable.placement.slices(), variable._variables, strict=True):
        part.assign(tf.reshape(value[where], part.shape), read_value=False)
