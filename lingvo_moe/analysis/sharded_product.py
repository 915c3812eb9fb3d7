"""The cost of one product of two sharded tensors: how the devices divide it, and the collectives that this needs.

A model of XLA's partitioner (GSPMD section 3.5), not the partitioner. Along each mesh axis the devices divide one
logical axis of the product among them, or none and repeat the work. An operand that is sharded otherwise is first
resharded by AllToAll or AllGather. Where the divided axis is contracted, each device has a term of the sum, which an
AllReduce completes, or a ReduceScatter if the result is sharded along that mesh axis. The model takes the choice of
the least time, whereas XLA has heuristics; docs/planning.md compares both.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from lingvo_moe.analysis.hardware import Network, Torus

_TILE = 128  # rows and columns of a matrix unit (Jouppi et al. 2020, table 1)
_NOT_SHARDED = -1

# The mesh axis of each dimension, -1 for none; see `Layout.dims_mapping`.
Sharding = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Machine:
    """The devices and the mesh that they form, as far as times depend on them.

    Attributes:
      mesh: sizes of the mesh's axes, of devices in row-major order.
      links: between the devices.
      flops: operations per second of a device that products reach.
      memory_bandwidth: bytes per second of a device.
    """

    mesh: tuple[int, ...]
    links: Torus | Network
    flops: float
    memory_bandwidth: float

    def collective_seconds(self, kind: str, size: float, axis: int) -> float:
        """Returns the seconds of a collective with `size` bytes of result, along a mesh axis."""
        return size * self._seconds_per_byte(kind, axis)

    @functools.cached_property
    def _seconds_per_byte(self) -> Callable[[str, int], float]:
        """Returns the seconds per byte of a kind of collectives along a mesh axis: `hardware`'s times are linear."""

        def of_axis(kind: str, axis: int) -> float:
            groups = np.moveaxis(np.arange(math.prod(self.mesh)).reshape(self.mesh), axis, 0)
            if kind == "collective-permute":  # to the next device along the axis
                targets = np.roll(groups, -1, 0)
                return self.links.permute_seconds(1.0, list(zip(groups.flatten().tolist(), targets.flatten().tolist())))
            return self.links.seconds(kind, 1.0, groups.reshape(len(groups), -1)[:, 0].tolist())

        return functools.cache(of_axis)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a product.

    Attributes:
      name: tensors of one name are one tensor, which is gathered once.
      axes: its logical axes.
      copies: how many tensors of this shape there are: queries, keys and values have a weight each.
      is_weight: whether it is a weight, or the gradient of one.
    """

    name: str
    axes: str
    copies: int = 1
    is_weight: bool = False

    @property
    def gradient(self) -> Tensor:
        """The tensor's gradient."""
        return dataclasses.replace(self, name=f"d {self.name}")


@dataclasses.dataclass(frozen=True)
class Product:
    """`left` times `right`, summed over the logical axes that `out` does not have.

    Attributes:
      left, right, out: the tensors; there are `max(left.copies, right.copies)` such products.
      operand_bytes, result_bytes: of an element where it is communicated. A TPU rounds float32 operands to bfloat16.
      is_lookup: of a one-hot `left`: rows are read, nothing is multiplied, and `left` need not be communicated.
    """

    left: Tensor
    right: Tensor
    out: Tensor
    operand_bytes: int
    result_bytes: int
    is_lookup: bool = False

    def backward(self) -> Iterator[Product]:
        """Yields the products of the backward pass, by which both operands get their gradients."""
        if not self.is_lookup:
            yield dataclasses.replace(self, left=self.out.gradient, right=self.right, out=self.left.gradient)
        yield dataclasses.replace(self, left=self.left, right=self.out.gradient, out=self.right.gradient)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Operands and result."""
        return self.left, self.right, self.out


class Move(NamedTuple):
    """A collective.

    Attributes:
      key: moves of one key are one move: a gathered tensor is used by all products that need it.
      kind: see `collectives.COLLECTIVES`.
      axis: of the mesh.
      size: bytes of the result on each device, of all copies.
      seconds: at the links' full bandwidth.
      is_weight: whether it is a weight, or the gradient of one.
    """

    key: tuple
    kind: str
    axis: int
    size: float
    seconds: float
    is_weight: bool


class Division(NamedTuple):
    """How devices divide a product: the compute seconds of one of them, and the collectives."""

    seconds: float
    moves: tuple[Move, ...]

    @property
    def total(self) -> float:
        """Seconds of computation and collectives."""
        return self.seconds + sum(move.seconds for move in self.moves)


@dataclasses.dataclass(frozen=True)
class Partitioner:
    """The sharding of all tensors, by which products are divided.

    Attributes:
      shardings: by the logical axes of a tensor.
      sizes: of logical axes, by their upper-case names.
      machine: the devices.
    """

    shardings: Mapping[str, Sharding]
    sizes: Mapping[str, int]
    machine: Machine

    def elements(self, axes: str) -> float:
        """Returns how many elements of a tensor a device has."""
        return self._elements(axes, self._by_axis(axes))

    def divide(self, product: Product) -> Division:
        """Returns the fastest way to divide a product."""
        options = []
        for axis in range(len(self.machine.mesh)):
            sharded = {self._by_axis(tensor.axes).get(axis) for tensor in product.tensors}
            options.append([None, *sorted(filter(None, sharded))])
        divisions = []
        for choice in itertools.product(*options):
            divided = {axis: logical for axis, logical in enumerate(choice) if logical}
            if len(set(divided.values())) == len(divided) and self._keeps_table(product, divided):
                divisions.append(self._division(product, divided))
        return min(divisions, key=lambda division: division.total)

    def reshard(self, tensor: Tensor, before: str, item_bytes: int) -> tuple[Move, ...]:
        """Returns what brings a tensor from the sharding of `before` to that of its axes: an AllToAll, mostly."""
        return tuple(self._moves(tensor, self._by_axis(before), self._by_axis(tensor.axes), item_bytes))

    def _keeps_table(self, product: Product, divided: Mapping[int, str]) -> bool:
        """Whether a lookup in a table that two mesh axes shard reads one that still is sharded along the larger one.

        XLA does so, also where it would be faster to gather the table there than to move the vectors: in the plans of
        GSPMD tables 3 and 7, an AllToAll moves them along the axis that shards M if that is the larger one.
        """
        sharded = self._by_axis(product.right.axes)
        if not (product.is_lookup and product.right.is_weight and len(sharded) > 1):
            return True
        largest = max(sharded, key=lambda axis: self.machine.mesh[axis])
        return divided.get(largest) == sharded[largest]

    def _division(self, product: Product, divided: dict[int, str]) -> Division:
        """The cost if devices divide these axes, `{mesh axis: logical axis}`."""
        moves: list[Move] = []
        for tensor in (product.left, product.right):
            if not (product.is_lookup and tensor is product.left):
                target = {axis: logical for axis, logical in divided.items() if logical in tensor.axes}
                moves += self._moves(tensor, self._by_axis(tensor.axes), target, product.operand_bytes)
        moves += self._completed(product.out, divided, product.result_bytes)
        return Division(self._compute_seconds(product, divided), tuple(moves))

    def _moves(
        self, tensor: Tensor, start: Mapping[int, str], target: Mapping[int, str], item_bytes: int
    ) -> Iterator[Move]:
        """The collectives from one sharding to another, each `{mesh axis: logical axis}`.

        What only becomes smaller is a slice, and free. AllToAlls come before AllGathers, of the smaller tensor.
        """
        current = dict(start)
        for axis, logical in target.items():
            if axis not in current and logical not in current.values():
                current[axis] = logical
        for axis, logical in target.items():
            if current.get(axis) not in (None, logical) and logical not in current.values():
                current[axis] = logical
                yield self._move("all-to-all", tensor, axis, logical, current, item_bytes)
        # Where two mesh axes swap what they shard, one is left: it is gathered, and then sliced, which is free.
        misplaced = [axis for axis in current if current[axis] != target.get(axis)]
        for axis in sorted(misplaced, key=lambda axis: self.machine.mesh[axis]):
            del current[axis]
            yield self._move("all-gather", tensor, axis, "", current, item_bytes)

    def _completed(self, out: Tensor, divided: Mapping[int, str], item_bytes: int) -> Iterator[Move]:
        """The collectives from the result as it is computed to the result as it is annotated."""
        wanted = self._by_axis(out.axes)
        current = {axis: logical for axis, logical in divided.items() if logical in out.axes}
        for axis in [axis for axis, logical in divided.items() if logical not in out.axes]:
            logical = wanted.get(axis)
            if logical is None or logical in current.values():
                yield self._move("all-reduce", out, axis, "", current, item_bytes)
                continue
            before, current[axis] = dict(current), logical
            # libtpu writes no ReduceScatter whose parts have a last dimension of one tile or less, but an AllReduce
            # and a slice: in the plans of GSPMD table 2, M = 8192 along an axis of 64, and not of 32.
            if logical == out.axes[-1] and self.sizes[logical.upper()] // self.machine.mesh[axis] <= _TILE:
                yield self._move("all-reduce", out, axis, logical, before, item_bytes)
            else:
                yield self._move("reduce-scatter", out, axis, logical, current, item_bytes)
        yield from self._moves(out, current, wanted, item_bytes)

    def _move(
        self, kind: str, tensor: Tensor, axis: int, logical: str, result: Mapping[int, str], item_bytes: int
    ) -> Move:
        size = self._elements(tensor.axes, result) * item_bytes
        seconds = tensor.copies * self.machine.collective_seconds(kind, size, axis)
        return Move((tensor.name, kind, axis, logical), kind, axis, tensor.copies * size, seconds, tensor.is_weight)

    def _compute_seconds(self, product: Product, divided: Mapping[int, str]) -> float:
        """Matrix products of a device, in whole tiles, or the reading of the operands, whichever is longer."""
        if product.is_lookup:
            return 0.0
        left, right, out = (set(tensor.axes) for tensor in product.tensors)
        local = {logical: self.sizes[logical.upper()] for logical in left | right | out}
        for axis, logical in divided.items():
            local[logical] = -(-local[logical] // self.machine.mesh[axis])
        matrices = [math.prod(local[logical] for logical in part) for part in (left - right, right - left, left - out)]
        copies = max(product.left.copies, product.right.copies)
        batch = copies * math.prod(local[logical] for logical in left & right & out)
        flops = 2 * batch * math.prod(-(-size // _TILE) * _TILE for size in matrices)
        read = product.operand_bytes * sum(
            tensor.copies * math.prod(local[logical] for logical in tensor.axes) for tensor in product.tensors
        )
        return max(flops / self.machine.flops, read / self.machine.memory_bandwidth)

    def _elements(self, axes: str, current: Mapping[int, str]) -> float:
        shards = math.prod(self.machine.mesh[axis] for axis in current)
        return math.prod(self.sizes[logical.upper()] for logical in axes) / shards

    def _by_axis(self, axes: str) -> dict[int, str]:
        """The logical axis that is sharded along each mesh axis."""
        return {axis: logical for logical, axis in zip(axes, self.shardings[axes]) if axis != _NOT_SHARDED}
