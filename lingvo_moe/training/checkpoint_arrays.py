"""The arrays of a checkpoint: each shard is written with a checksum, which is verified whenever the shard is read.

An item of arrays (`theta`, `rest`) is stored as Orbax stores it, zarr3 arrays in an OCDBT key-value store; a shard is
one chunk, or several of at most 64 MiB. TensorStore verifies the CRC-32C of OCDBT's own nodes, but Orbax writes chunks
without one, so that a flipped bit would become another weight. The writer here adds the `crc32c` codec of zarr3.
Whatever is read is thereby verified as it is read, by the process that reads it, and no file is read a second time to
be trusted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
import tensorstore
from orbax import checkpoint as orbax
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals, Future

from lingvo_moe import tree
from lingvo_moe.engines.base import ShardedTensor
from lingvo_moe.errors import UserError
from lingvo_moe.sharding.layout import Spec
from lingvo_moe.training.checkpoint_errors import CorruptCheckpoint, is_corruption, reason

Index = tuple[slice, ...]
# The order is that of encoding: the checksum is of the compressed bytes.
_CODECS = (
    {"name": "bytes", "configuration": {"endian": "little"}},
    {"name": "zstd", "configuration": {"level": 1}},
    {"name": "crc32c"},
)
# The largest chunk. A reader reads whole chunks, and holds the bytes of some beside the array.
_CHUNK_BYTES = 2**26
# Bytes of each item that are on their way from a `ShardedTensor` to files, which the host must hold.
_MAX_BYTES_IN_FLIGHT = 2**28


class StoredArray:
    """An array in a checkpoint. `array[index]` reads what is asked for, and nothing is read before.

    Attributes:
      shape: of the whole array.
      dtype: of the elements.
    """

    def __init__(self, store: tensorstore.TensorStore, name: str):
        """Takes an open array; `name` is for messages."""
        self.shape, self.dtype = store.shape, store.dtype.numpy_dtype
        self._store, self._name = store, name

    def __getitem__(self, index: Index) -> np.ndarray:
        """Reads a slice.

        Raises:
          CorruptCheckpoint: the bytes are not those that were written, or are gone.
          UserError: the file system refuses to read them.
        """
        try:
            return self._store[index].read().result()
        except (ValueError, OSError) as error:
            kind = CorruptCheckpoint if is_corruption(error) else UserError
            raise kind(
                f"{self._name} of the checkpoint can no longer be read ({reason(error)}). Check that the file system "
                f"of --logdir is still mounted; `checkpoint verify` names the files that changed."
            ) from error


@dataclasses.dataclass(frozen=True)
class _Shards:
    """What this process writes of one array.

    Attributes:
      shape: of the whole array.
      shard_shape: of each shard, which whole chunks make up.
      dtype: of the elements.
      shards: returns (index, value) of each shard to write here.
      on_host: whether the values are in this host's memory; otherwise each is copied there as it is yielded.
    """

    shape: tuple[int, ...]
    shard_shape: tuple[int, ...]
    dtype: np.dtype
    shards: Callable[[], Iterable[tuple[Index, np.ndarray]]]
    on_host: bool

    @property
    def size(self) -> int:
        """Number of elements, which Orbax asks for."""
        return math.prod(self.shape)


class _Handler(orbax.type_handlers.NumpyHandler):
    """Writes `_Shards`, reads `StoredArray`s; the rest of Orbax's handler of arrays on the host is as it was."""

    async def serialize(self, values: Sequence, infos: Sequence, args: Sequence | None = None) -> Sequence[Future]:
        return [CommitFutureAwaitingContractedSignals(_write(values, infos), name="arrays")]

    async def deserialize(self, infos: Sequence, args: Sequence | None = None) -> Sequence[Any]:
        found = []
        for info in infos:
            spec = orbax.type_handlers.get_json_tspec_read(info, use_ocdbt=info.is_ocdbt_checkpoint)
            store = await tensorstore.open(tensorstore.Spec(spec), open=True, context=info.ts_context)
            found.append(StoredArray(store, info.name.replace(".", "/")))
        return found


class ArraysHandler(orbax.PyTreeCheckpointHandler):
    """Saves one item, a tree of arrays, with checksums; restores it as `StoredArray`s."""

    def __init__(self):
        handler = _Handler()
        registry = orbax.type_handlers.create_type_handler_registry((_Shards, handler), (StoredArray, handler))
        super().__init__(type_handler_registry=registry, use_zarr3=True)


@orbax.args.register_with_handler(ArraysHandler, for_save=True)
@dataclasses.dataclass
class SaveArrays(orbax.args.PyTreeSave):
    """Saves a tree of arrays; made by `save_arguments`."""


@orbax.args.register_with_handler(ArraysHandler, for_restore=True)
@dataclasses.dataclass
class RestoreStoredArrays(orbax.args.PyTreeRestore):
    """Restores a tree of `StoredArray`s; made by `restore_arguments`."""


def save_arguments(arrays: dict) -> SaveArrays:
    """Returns the arguments that save a tree of arrays.

    JAX arrays are copied to the host before this returns, or on CPUs referred to: JAX does not reuse a donated buffer
    as long as NumPy refers to it. A `ShardedTensor` is read while it is written, so it must not change until the save
    has finished.
    """
    leaves = tree.flatten(arrays)
    for leaf in leaves.values():
        if isinstance(leaf, jax.Array):
            leaf.copy_to_host_async()
    return SaveArrays(
        tree.unflatten({path: _shards_of(leaf, number) for number, (path, leaf) in enumerate(leaves.items())})
    )


def restore_arguments(specs: dict) -> RestoreStoredArrays:
    """Returns the arguments that restore a tree with the paths of these `Spec`s, of `StoredArray`s."""
    return RestoreStoredArrays(
        tree.map_leaves(lambda spec: 0, specs),
        tree.map_leaves(lambda spec: orbax.RestoreArgs(restore_type=StoredArray), specs),
    )


def restore_on_devices(specs: dict, shardings: dict) -> orbax.args.StandardRestore:
    """Returns the arguments that restore JAX arrays of these `Spec`s; each process reads what its devices hold."""

    def abstract(spec: Spec, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(spec.shape, np.dtype(spec.dtype), sharding=sharding)

    return orbax.args.StandardRestore(tree.map_leaves(abstract, specs, shardings))


def devices_handler(arguments: orbax.args.StandardRestore) -> orbax.StandardCheckpointHandler:
    """Returns the handler that restores an item with the arguments of `restore_on_devices`, few arrays at a time.

    Beside arrays on devices, the host holds those that are being read: bytes from files, decoded ones, and Orbax's
    copy. By default, Orbax reads up to 96 GB at a time, all weights of most models; here it is about the largest array.
    """
    leaves = jax.tree_util.tree_leaves(arguments.item)
    largest = max(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    # Orbax counts whole GB, and refuses an array that is as large as the limit.
    return orbax.StandardCheckpointHandler(restore_concurrent_gb=largest // 10**9 + 1)


def check_finite(theta: dict, name: str, remedy: str):
    """Raises UserError, naming `name` and the weight, for a weight that is not finite: all results would be wrong.

    Args:
      theta: a tree of NumPy or JAX arrays or `ShardedTensor`s; of these, what the devices of this process hold is
        checked.
      name: what has the weights.
      remedy: the end of the message.
    """
    if (problem := finite_problem(theta, name, remedy)) is not None:
        raise UserError(problem)


def finite_problem(theta: dict, name: str, remedy: str) -> str | None:
    """Returns the message of `check_finite`; None if all weights are finite."""
    for path, weight in tree.flatten(theta).items():
        if not all(np.isfinite(np.asarray(shard)).all() for shard in _held(weight)):
            return f"{name}: {path} has values that are not finite; {remedy}."
    return None


def _held(weight: Any) -> Iterable[Any]:
    """Returns the parts of a weight that the devices of this process hold."""
    if isinstance(weight, ShardedTensor):
        return (shard for _, shard in weight.shards())
    if isinstance(weight, jax.Array):
        # JAX keeps the copy on the host that NumPy asks for as long as the array, which `addressable_data` makes anew.
        return [s.data.addressable_data(0) for s in weight.addressable_shards if s.replica_id == 0]
    return [weight]


def has_sharded_tensors(arrays: dict) -> bool:
    """Returns whether a leaf is a `ShardedTensor`, which `save_arguments` does not copy."""
    return any(isinstance(leaf, ShardedTensor) for leaf in tree.flatten(arrays).values())


def _shards_of(leaf: Any, number: int) -> _Shards:
    """Returns what this process writes of the array with this number in its tree."""
    if isinstance(leaf, ShardedTensor):
        return _Shards(leaf.shape, leaf.shard_shape, leaf.dtype, leaf.shards, on_host=False)
    if isinstance(leaf, jax.Array):
        shard_shape = leaf.sharding.shard_shape(leaf.shape)
        # Copies are written by other devices' processes from array to array, so that all processes write about as much.
        replica = number % (leaf.sharding.num_devices * math.prod(shard_shape) // math.prod(leaf.shape))
        shards = [(s.index, np.asarray(s.data)) for s in leaf.addressable_shards if s.replica_id == replica]
        return _Shards(leaf.shape, shard_shape, leaf.dtype, lambda: shards, on_host=True)
    array = np.asarray(leaf)
    whole = [((slice(None),) * array.ndim, array)] if jax.process_index() == 0 else []
    return _Shards(array.shape, array.shape, array.dtype, lambda: whole, on_host=True)


async def _write(values: Sequence[_Shards], infos: Sequence):
    """Writes the shards of all arrays; of those that are not on the host, `_MAX_BYTES_IN_FLIGHT` at a time."""
    writes: list[Any] = []
    in_flight = 0
    for value, info in zip(values, infos, strict=True):
        await info.await_path_creation()
        store = None
        for index, shard in value.shards():
            if store is None:
                store = await tensorstore.open(
                    _store_spec(value, info), create=True, open=True, context=info.ts_context
                )
            if not value.on_host and in_flight + shard.nbytes > _MAX_BYTES_IN_FLIGHT:
                await _finish(writes)
                in_flight = 0
            writes.append(store[index].write(shard, can_reference_source_data_indefinitely=True))
            in_flight += shard.nbytes
    await _finish(writes)


def _store_spec(value: _Shards, info: Any) -> tensorstore.Spec:
    """Returns the array that Orbax would make in this process's OCDBT database, with a checksum for each chunk."""
    spec = orbax.type_handlers.get_json_tspec_write(
        info,
        use_ocdbt=info.is_ocdbt_checkpoint,
        global_shape=value.shape,
        local_shape=value.shard_shape,
        dtype=value.dtype,
        process_index=jax.process_index(),
        arg=orbax.SaveArgs(chunk_byte_size=_CHUNK_BYTES),
    )
    spec["metadata"] |= {"codecs": _CODECS}
    return tensorstore.Spec(spec)


async def _finish(writes: list[Any]):
    """Waits until these are in files, and forgets them."""
    for write in writes:
        await write
    writes.clear()
