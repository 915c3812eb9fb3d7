"""For tests of the TPUStrategy engine: a slice of 8 cores, each of which is this machine's CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lingvo_moe.engines import tpu_strategy_graph
from lingvo_moe.engines.tpu_strategy import Engine, Training
from lingvo_moe.engines.tpu_strategy_variables import ShardedVariable, TensorSharding
from lingvo_moe.lazy import tf
from lingvo_moe.sharding import spmd

CHIPS = (2, 2, 1)  # of 8 cores


def engine() -> Engine:
    """Returns the engine of such a slice; the variables of every core exist and can be read."""
    made = tpu_strategy_graph.stand_in(CHIPS)
    made.devices = made.hosts = ["/device:CPU:0"] * len(made.devices)
    return made


def run_programs_here(patch: pytest.MonkeyPatch):
    """Makes engines of this process run programs, on a mesh with one axis.

    TensorFlow's XLA compiles each program as one computation for one device. `Training` is the same as on a TPU,
    except for the operators that only a TPU has: those that present the shards of all cores as one tensor, and the
    one that runs a program on all cores.
    """
    patch.setattr(Training, "_run", _run)
    patch.setattr(TensorSharding, "join", _joined)
    patch.setattr(ShardedVariable, "handle", lambda self: None)
    patch.setattr(ShardedVariable, "read", _read)
    patch.setattr(ShardedVariable, "write", _write)


def _run(training: Training, program: Callable, leaves: dict[str, ShardedVariable], argument: Any) -> Any:
    handles = {path: variable.handle() for path, variable in leaves.items()}
    compiled = tf.function(lambda argument: program(handles, argument), jit_compile=True, autograph=False)
    with spmd.annotating_for(len(training._engine.devices)):
        return compiled(argument)


def _joined(sharding: TensorSharding, shards: Sequence[tf.Tensor]) -> tf.Tensor:
    """Joins shards in row-major order along the last dimension, then along the one before it."""
    for axis, count in reversed(list(enumerate(sharding.partition_dims))):
        shards = [tf.concat(shards[first : first + count], axis) for first in range(0, len(shards), count)]
    return shards[0]


def _read(variable: ShardedVariable, handle: None) -> tf.Tensor:
    return _joined(variable.sharding, [shard.read_value() for shard in variable._variables])


def _write(variable: ShardedVariable, handle: None, value: tf.Tensor):
    for index, shard in zip(variable.sharding.slices(), variable._variables, strict=True):
        shard.assign(tf.reshape(value[index], shard.shape), read_value=False)
