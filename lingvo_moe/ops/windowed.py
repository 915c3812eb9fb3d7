"""Windowed einsum (collective matmul): multiplies tensors that a mesh axis shards differently, without an AllGather.

The mesh axis shards the two tensors along different dimensions. GShard section 3.3.2, "slicing in a loop" (figure 4c),
after Cannon's algorithm. The partitioner would gather one of the tensors on every device. Here that tensor moves around
the ring of the mesh axis's devices, one slice at a time: a device multiplies by the slice that it has while the next
one arrives by CollectivePermute. So a device holds two slices, O(1/D) of the tensor, and D - 1 CollectivePermutes carry
what one AllGather does.

The devices are a dimension of their own, U, as in `sharding.partial`. The gradients are windowed einsums, too: that of
the tensor that moves is a sum that moves. docs/operators.md compares this form with the one that XLA makes for TPUs
itself (`windowed_einsum_mib`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from lingvo_moe.errors import UserError
from lingvo_moe.lazy import tf
from lingvo_moe.ops.gradients import named_gradient
from lingvo_moe.ops.slices import dynamic_slice, dynamic_update_slice
from lingvo_moe.sharding import leading_dimension
from lingvo_moe.sharding.layout import UNREDUCED, Layout
from lingvo_moe.sharding.partial import parse_product

_STARTS = UNREDUCED + "r"  # logical axes of `[U, rank]`: for each device, an index into each dimension


def windowed_einsum(equation: str, left: tf.Tensor, right: tf.Tensor, mesh_axis: str, layout: Layout) -> tf.Tensor:
    """An einsum of tensors that `mesh_axis` shards along different dimensions, in as many steps as it has devices.

    One tensor stays: the one with the dimension that `mesh_axis` shards in the result. The other one moves and is not
    gathered along `mesh_axis`. Along other mesh axes the dimensions that `mesh_axis` shards are gathered. Only for
    compiled programs.

    Args:
      equation: in logical axes: `BTM,MH->BTH`. Each axis is in two of the three tensors, or in all.
      left: a factor, of a floating-point dtype, in which sums over steps are added as well.
      right: the other factor, of the same dtype.
      mesh_axis: the name of one of the mesh's axes.
      layout: decides which dimensions `mesh_axis` shards.

    Returns:
      The product, with the layout's sharding.

    Raises:
      UserError: the mesh axis does not exist, does not shard the factors along different dimensions, or does not shard
        the result along one of these; its devices do not divide a dimension; the equation is malformed, or has an
        axis in other than two or three tensors; or the layout is of vectorised tensors.
    """
    axes = parse_product(equation)
    _check(equation, axes, mesh_axis, layout)
    if layout.mesh.axis_size(mesh_axis) == 1:
        return layout.annotate(tf.einsum(equation, left, right), axes[2])
    staying, moving = sorted(
        ((left, axes[0]), (right, axes[1])),
        key=lambda factor: _sharded_axis(factor[1], mesh_axis, layout) != _sharded_axis(axes[2], mesh_axis, layout),
    )
    product = _Product.of(staying[1], moving[1], axes[2], mesh_axis, layout)

    @named_gradient
    def in_slices(stays: tf.Tensor, moves: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            upstream = product.annotate(upstream, product.result)
            return product.gradient_of_staying(upstream, moves), product.gradient_of_moving(stays, upstream)

        return product.multiply(stays, moves), gradient

    parts = product.split(*staying, product.stays), product.split(*moving, product.moves)
    return product.join(in_slices(*parts), axes[2])


@dataclasses.dataclass(frozen=True)
class _Product:
    """The product of the tensor that stays and the one that moves, and its gradients, in slices.

    Attributes:
      stays, moves, result: the logical axes of the three tensors, the first of which is U. The two that the mesh axis
        shards are in lower case, since nothing else shards them.
      sliced: the logical axis that the mesh axis shards in the tensor that moves; not sharded in one of the other two.
      mesh_axis, layout: the arguments of `windowed_einsum`.
    """

    stays: str
    moves: str
    result: str
    sliced: str
    mesh_axis: str
    layout: Layout

    @staticmethod
    def of(stays: str, moves: str, result: str, mesh_axis: str, layout: Layout) -> _Product:
        """The product of tensors with these logical axes."""
        kept, sliced = (_sharded_axis(axes, mesh_axis, layout) for axes in (stays, moves))

        def own(axes: str) -> str:
            return UNREDUCED + axes.replace(kept, kept.lower()).replace(sliced, sliced.lower())

        return _Product(own(stays), own(moves), own(result), sliced.lower(), mesh_axis, layout)

    @property
    def devices(self) -> int:
        """The number of devices along the mesh axis, which is also the number of steps."""
        return self.layout.mesh.axis_size(self.mesh_axis)

    def annotate(self, tensor: tf.Tensor, axes: str) -> tf.Tensor:
        """Annotates a tensor that has the dimension U."""
        return self.layout.unreduced(self.mesh_axis).annotate(tensor, axes)

    def split(self, tensor: tf.Tensor, axes: str, own: str) -> tf.Tensor:
        """Reshapes `[..., K, ...]`, where the mesh axis shards K, to `[U, ..., K / U, ...]` with the axes `own`."""
        sharded, shape = _sharded_axis(axes, self.mesh_axis, self.layout), tensor.shape
        position = axes.index(sharded)
        if shape[position] % self.devices:
            raise UserError(
                f"windowed_einsum: {sharded} of {axes} is {shape[position]}, which the {self.devices} devices along "
                f"mesh axis {self.mesh_axis} do not divide. Use a multiple of {self.devices}, or tf.einsum."
            )
        parts = (*shape[:position], self.devices, shape[position] // self.devices, *shape[position + 1 :])
        split = tf.reshape(self.layout.annotate(tensor, axes), parts)
        # On two mesh axes, TensorFlow's operator writes an invalid sharding for a manual dimension behind others.
        first = tf.transpose(split, [position, *(d for d in range(len(parts)) if d != position)])
        return self.annotate(first, own)

    def join(self, tensor: tf.Tensor, axes: str) -> tf.Tensor:
        """Inverts `split`, for the result."""
        position = axes.index(_sharded_axis(axes, self.mesh_axis, self.layout))
        split = tf.transpose(tensor, [*range(1, position + 1), 0, *range(position + 1, len(axes) + 1)])
        shape = (*split.shape[:position], -1, *split.shape[position + 2 :])
        return self.layout.annotate(tf.reshape(split, shape), axes)

    def multiply(self, stays: tf.Tensor, moves: tf.Tensor) -> tf.Tensor:
        """The product."""
        return self._with_moving_factor(stays, self.stays, moves, self.result)

    def gradient_of_staying(self, upstream: tf.Tensor, moves: tf.Tensor) -> tf.Tensor:
        """The gradient of the tensor that stays: the other one moves again, and is not stored in between."""
        return self._with_moving_factor(upstream, self.result, moves, self.stays)

    def _with_moving_factor(self, factor: tf.Tensor, axes: str, moves: tf.Tensor, result_axes: str) -> tf.Tensor:
        """The product of a tensor that stays and the one that moves."""
        sizes = dict(zip(self.moves, moves.shape)) | dict(zip(axes, factor.shape))
        sizes[self.sliced] = self.devices * moves.shape[self.moves.index(self.sliced)]

        def add(k: tf.Tensor | int, moves: tf.Tensor, result: tf.Tensor) -> tf.Tensor:
            part = (self._device() + k) % self.devices
            own = self._take(factor, axes, part) if self.sliced in axes else factor
            block = self.annotate(tf.einsum(f"{axes},{self.moves}->{result_axes}", own, moves), result_axes)
            return self._put(result, result_axes, block, part) if self.sliced in result_axes else result + block

        def step(k: tf.Tensor, moves: tf.Tensor, result: tf.Tensor) -> tuple:
            return k + 1, self._pass_back(moves), self.annotate(add(k, moves, result), result_axes)

        start = self.annotate(tf.zeros([sizes[axis] for axis in result_axes], factor.dtype), result_axes)
        _, moves, result = self._loop(step, 0, moves, start)
        # The last slice is not passed on.
        return self.annotate(add(self.devices - 1, moves, result), result_axes)

    def gradient_of_moving(self, stays: tf.Tensor, upstream: tf.Tensor) -> tf.Tensor:
        """The gradient of the tensor that moves: each slice's sum visits all devices and ends at that of the slice."""

        def term(k: tf.Tensor | int) -> tf.Tensor:
            part = (self._device() + (self.devices - 1 - k)) % self.devices
            factors = [
                self._take(tensor, axes, part) if self.sliced in axes else tensor
                for tensor, axes in ((stays, self.stays), (upstream, self.result))
            ]
            return self.annotate(tf.einsum(f"{self.stays},{self.result}->{self.moves}", *factors), self.moves)

        def step(k: tf.Tensor, total: tf.Tensor) -> tuple:
            return k + 1, self.annotate(self._pass_on(total) + term(k), self.moves)

        return self._loop(step, 1, term(0))[1]

    def _loop(self, step: Callable[..., tuple], first: int, *state: tf.Tensor) -> tuple:
        """Runs D - 1 steps, numbered from `first`.

        An iteration of the loop has two steps: the slice that a device multiplies by and the one that arrives swap
        their memory, for which an iteration of one step would need a copy.
        """
        pairs, odd = divmod(self.devices - 1, 2)
        state = (tf.constant(first), *state)
        if pairs:
            last = first + 2 * pairs
            state = tf.while_loop(lambda k, *_: k < last, lambda *s: step(*step(*s)), state, maximum_iterations=pairs)
        return step(*state) if odd else state

    def _device(self) -> tf.Tensor:
        """`[U]`: each device's number along the mesh axis."""
        return self.annotate(tf.range(self.devices), UNREDUCED)

    def _pass_back(self, slices: tf.Tensor) -> tf.Tensor:
        """Sends each device's slice to the device before it, by CollectivePermute."""
        return self.annotate(leading_dimension.pass_back(slices), self.moves)

    def _pass_on(self, slices: tf.Tensor) -> tf.Tensor:
        """Sends each device's slice to the device after it."""
        return self.annotate(leading_dimension.pass_on(slices), self.moves)

    def _take(self, tensor: tf.Tensor, axes: str, part: tf.Tensor) -> tf.Tensor:
        """On each device, takes slice `part [U]` of the sliced dimension."""
        dimension = axes.index(self.sliced)
        size = tensor.shape[dimension] // self.devices

        def take(own: tf.Tensor, start: tf.Tensor) -> tf.Tensor:
            return dynamic_slice(own, start[0], [*own.shape[:dimension], size, *own.shape[dimension + 1 :]])

        starts = self._starts(part * size, axes)
        return self._map_shards(take, [(tensor, axes), (starts, _STARTS)], axes)

    def _put(self, tensor: tf.Tensor, axes: str, block: tf.Tensor, part: tf.Tensor) -> tf.Tensor:
        """On each device, replaces slice `part [U]` of the sliced dimension by `block`."""
        starts = self._starts(part * block.shape[axes.index(self.sliced)], axes)
        arguments = [(tensor, axes), (block, axes), (starts, _STARTS)]
        return self._map_shards(lambda own, block, start: dynamic_update_slice(own, block, start[0]), arguments, axes)

    def _starts(self, index: tf.Tensor, axes: str) -> tf.Tensor:
        """`[U, rank]`: where the slice of each device starts, at `index [U]` of the sliced dimension."""
        return self.annotate(index[:, None] * tf.constant([[int(axis == self.sliced) for axis in axes]]), _STARTS)

    def _map_shards(
        self, function: Callable[..., tf.Tensor], arguments: Sequence[tuple[tf.Tensor, str]], axes: str
    ) -> tf.Tensor:
        """Applies `function` on each device to its part of U."""
        return leading_dimension.map_shards(function, arguments, axes, self.layout.unreduced(self.mesh_axis))


def _sharded_axis(axes: str, mesh_axis: str, layout: Layout) -> str:
    """The logical axis that a mesh axis shards; empty for none."""
    return "".join(axis for axis, shards in zip(axes, layout.mesh_axes(axes)) if shards == mesh_axis)


def _check(equation: str, axes: tuple[str, str, str], mesh_axis: str, layout: Layout):
    """Raises UserError unless the mesh axis shards the factors along different axes, and the result along one."""
    where = f"windowed_einsum {equation}"
    if mesh_axis not in layout.mesh.axis_names:
        raise UserError(
            f"{where}: {mesh_axis!r} is not an axis of the mesh {layout.mesh}; use one of "
            f"{', '.join(layout.mesh.axis_names)}."
        )
    if layout.outer_axes:
        raise UserError(f"{where}: the layout is for tensors vectorised over {layout.outer_axes}; use tf.einsum.")
    of_left, of_right, of_result = sharded = [_sharded_axis(each, mesh_axis, layout) for each in axes]
    described = ", ".join(f"{axis or 'nothing'} of {each}" for axis, each in zip(sharded, axes))
    if not (of_left and of_right) or of_left == of_right:
        raise UserError(
            f"{where}: mesh axis {mesh_axis} shards {described}; expected a different dimension of each factor. Use "
            f"tf.einsum, or partial_sum for a deferred sum."
        )
    if of_result not in (of_left, of_right):
        raise UserError(
            f"{where}: mesh axis {mesh_axis} shards {described}; expected {of_left} or {of_right} of the result. "
            f"Change an axis rule of the layout, or use tf.einsum."
        )
    named = "".join(axes)
    for axis in named:
        found, expected = named.count(axis), (2,) if axis in (of_left, of_right) else (2, 3)
        if found not in expected:
            raise UserError(
                f"{where}: {axis} is a dimension of {found} of the three tensors; expected {expected[0]}. Use "
                f"tf.einsum."
            )
    for axis in (of_left, of_right):
        if axis.lower() in named:
            raise UserError(
                f"{where}: {axis} and {axis.lower()} are two logical axes that differ in case alone. Rename one."
            )
