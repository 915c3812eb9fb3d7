"""Checkpoints of a state that is nowhere whole: `ShardedTensor`s, written and read part by part.

The files are those that Orbax writes for arrays, a chunk for each part, so whichever engine wrote a checkpoint, either reads it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorstore
from orbax import checkpoint as orbax
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals, Future

from lingvo_moe import tree
from lingvo_moe.engines.base import ShardedTensor
from lingvo_moe.errors import UserError

# Bytes on their way from cores to files, of each item that is being saved: what the host must have room for.
_ON_THE_WAY = 2**28


class StoredArray:
    """An array in a checkpoint, of which `array[where]` reads a part when it is asked for one.

    Attributes:
      shape: of the whole.
      dtype: of its elements.
    """

    def __init__(self, store: tensorstore.TensorStore, name: str):
        """Takes what has been opened; `name` is for messages."""
        self.shape, self.dtype = store.shape, store.dtype.numpy_dtype
        self._store, self._name = store, name

    def __getitem__(self, where: tuple[slice, ...]) -> np.ndarray:
        """Reads a part; raises UserError where the file system does not give it."""
        try:
            return self._store[where].read().result()
        except (ValueError, OSError) as error:
            reason = str(error).partition("\n")[0][:200]
            raise UserError(
                f"{self._name} of the checkpoint cannot be read any more ({reason}); is its disk still there? Then "
                f"`checkpoint verify` tells what is damaged."
            ) from error


class _TypeHandler(orbax.type_handlers.NumpyHandler):
    """Orbax's own handler of arrays on the host, for arrays that are not there."""

    async def serialize(
        self, values: Sequence[ShardedTensor], infos: Sequence, args: Sequence | None = None
    ) -> list[Future]:
        return [CommitFutureAwaitingContractedSignals(_write(values, infos), name="parts")]

    async def deserialize(self, infos: Sequence, args: Sequence | None = None) -> list[StoredArray]:
        found = []
        for info in infos:
            spec = orbax.type_handlers.get_json_tspec_read(info, use_ocdbt=info.is_ocdbt_checkpoint)
            store = await tensorstore.open(tensorstore.Spec(spec), open=True, context=info.ts_context)
            found.append(StoredArray(store, info.name.replace(".", "/")))
        return found


class ShardedVariableHandler(orbax.PyTreeCheckpointHandler):
    """Saves and restores one item, a tree of `ShardedTensor`s."""

    def __init__(self):
        registry = orbax.type_handlers.create_type_handler_registry((ShardedTensor, _TypeHandler()))
        super().__init__(type_handler_registry=registry)


@orbax.args.register_with_handler(ShardedVariableHandler, for_save=True)
@dataclasses.dataclass
class SaveShardedVariables(orbax.args.PyTreeSave):
    """Save this tree of `ShardedTensor`s. They are read while it is being written, so nothing may change them before."""


@orbax.args.register_with_handler(ShardedVariableHandler, for_restore=True)
@dataclasses.dataclass
class RestoreShardedVariables(orbax.args.PyTreeRestore):
    """Restore as `StoredArray`s; make it with `restore_of`."""


def restore_of(specs: dict) -> RestoreShardedVariables:
    """Asks for a tree with the paths of these `Spec`s, of `StoredArray`s."""
    return RestoreShardedVariables(
        tree.map_leaves(lambda spec: 0, specs),
        tree.map_leaves(lambda spec: orbax.RestoreArgs(restore_type=ShardedTensor), specs),
    )


def has_sharded_variables(state: dict) -> bool:
    """Whether the leaves are `ShardedTensor`s; all are, or none."""
    return any(isinstance(leaf, ShardedTensor) for leaf in tree.flatten(state).values())


async def _write(values: Sequence[ShardedTensor], infos: Sequence):
    """Writes all parts, in order, and no more at a time than the host has room for."""
    writes: list[Any] = []
    held = 0
    for value, info in zip(values, infos, strict=True):
        await info.await_path_creation()
        spec = orbax.type_handlers.get_json_tspec_write(
            info,
            use_ocdbt=info.is_ocdbt_checkpoint,
            global_shape=value.shape,
            local_shape=value.shard_shape,
            dtype=value.dtype,
            process_index=0,
        )  # the one process that reaches all cores
        store = await tensorstore.open(tensorstore.Spec(spec), create=True, open=True, context=info.ts_context)
        for where, part in value.shards():
            if held + part.nbytes > _ON_THE_WAY:
                await _finish(writes)
                held = 0
            writes.append(store[where].write(part, can_reference_source_data_indefinitely=True))
            held += part.nbytes
    await _finish(writes)


async def _finish(writes: list[Any]):
    """Waits until these are in files, and forgets them."""
    for write in writes:
        await write
    writes.clear()
