"""How tokens reach the buffers of their experts and come back (GShard Algorithm 2, lines 3 and 9).

A group has E * C buffer positions, C of each expert, and each of its S tokens has K choices (see `ops.routing`). Two
ways carry the same rows:

  einsum  matmuls with a one-hot tensor `[G, S, E, C]`: what matrix units do best, and what XLA partitions by itself.
  gather  rows are taken by index; no tensor is larger than G * max(S * K, E * C) rows. XLA cannot know that no row
          leaves its group, so each device takes rows from its own groups in manual mode (GShard section 3.2).

`auto` is the faster of the two, see `choose`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lingvo_moe.errors import UserError, did_you_mean
from lingvo_moe.lazy import tf
from lingvo_moe.ops.context import Context
from lingvo_moe.ops.gradients import named_gradient
from lingvo_moe.ops.routing import NONE, Routing, sum_of_choices
from lingvo_moe.sharding import spmd
from lingvo_moe.sharding.layout import Layout


class Einsum:
    """Dispatch by one-hot matmuls; see the module's docstring."""

    def __init__(self, routing: Routing, num_experts: int, capacity: int, context: Context):
        self._context = context
        self._combine = context.cast(routing.combine_weights(num_experts, capacity))
        self._dispatch = context.cast(tf.not_equal(self._combine, 0.0))

    def dispatch(self, tokens: tf.Tensor) -> tf.Tensor:
        """`[G, S, M]` to buffers `[G, E, C, M]`, zeros in empty positions."""
        return self._context.annotate(tf.einsum("GSEC,GSM->GECM", self._dispatch, tokens), "GECM")

    def used(self) -> tf.Tensor:
        """The positions that have a token: `[G, E, C] bool`."""
        return self._context.annotate(tf.reduce_any(tf.not_equal(self._combine, 0.0), axis=1), "GEC")

    def combine(self, outputs: tf.Tensor) -> tf.Tensor:
        """`[G, E, C, M]` to `[G, S, M]`: the weighted sum over each token's positions, zeros where it has none."""
        return self._context.annotate(tf.einsum("GSEC,GECM->GSM", self._combine, outputs), "GSM")


class Gather:
    """Dispatch by row indices; see the module's docstring.

    Choice K * s + k of a group is token s's k-th, buffer position e * C + c is the c-th of expert e. The position of
    each choice and the choice at each position are inverse to each other, so that each direction's gradient is the
    other direction's gather: no row is ever added to memory, and the order of sums is fixed.
    """

    def __init__(self, routing: Routing, num_experts: int, capacity: int, context: Context):
        groups, size, self._num_choices = routing.shape
        self._weights, self._context = routing.weights, context
        self._num_experts, self._capacity = num_experts, capacity
        positions = tf.reshape(routing.buffer_positions(capacity), (groups, size * self._num_choices))
        self._positions = context.annotate(positions, "GS")
        num_positions = num_experts * capacity
        self._choices = _on_own_groups(
            lambda positions: choices_of(positions, num_positions),
            [(self._positions, "Gs")],
            "Gc",
            (groups, num_positions),
            context.layout,
        )

    def dispatch(self, tokens: tf.Tensor) -> tf.Tensor:
        """See `Einsum.dispatch`."""

        def to_positions(tokens: tf.Tensor) -> tuple[tf.Tensor, Callable]:
            rows = self._take(tokens, self._choices // self._num_choices)
            return rows, lambda upstream: tf.reduce_sum(self._by_token(upstream), axis=2)

        rows = named_gradient(to_positions)(tokens)
        rows = tf.reshape(rows, (-1, self._num_experts, self._capacity, tokens.shape[-1]))
        return self._context.annotate(rows, "GECM")

    def used(self) -> tf.Tensor:
        """See `Einsum.used`."""
        used = tf.reshape(tf.not_equal(self._choices, NONE), (-1, self._num_experts, self._capacity))
        return self._context.annotate(used, "GEC")

    def combine(self, outputs: tf.Tensor) -> tf.Tensor:
        """See `Einsum.combine`; weights and sums are float32."""
        groups, _, _, model_dim = outputs.shape
        rows = tf.reshape(outputs, (groups, -1, model_dim))
        return self._context.annotate(named_gradient(self._weighted_sums)(rows, self._weights), "GSM")

    def _weighted_sums(self, rows: tf.Tensor, weights: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        """Buffer positions `[G, E * C, M]` to the sums of each token's, and their gradient, which gathers tokens."""
        by_token = tf.cast(self._by_token(rows), tf.float32)

        def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            taken = tf.cast(self._take(upstream, self._choices // self._num_choices), tf.float32)
            of_rows = tf.cast(taken * self._of_positions(weights)[..., None], rows.dtype)
            # XLA's CPU compiler makes a matmul of this: a tenth of the time of a sum of products.
            of_weights = tf.einsum("GSKM,GSM->GSK", by_token, tf.cast(upstream, tf.float32))
            return of_rows, of_weights

        return self._context.cast(sum_of_choices(by_token * weights[..., None])), gradient

    def _by_token(self, rows: tf.Tensor) -> tf.Tensor:
        """Buffer positions `[G, E * C, M]` to each token's choices `[G, S, K, M]`."""
        return tf.reshape(self._take(rows, self._positions), (*self._weights.shape, rows.shape[-1]))

    def _of_positions(self, weights: tf.Tensor) -> tf.Tensor:
        """Weights of choices `[G, S, K]` to those of buffer positions `[G, E * C]`; any in empty ones."""
        return _on_own_groups(
            lambda weights, choices: tf.gather(weights, choices, axis=1, batch_dims=1),
            [(tf.reshape(weights, (weights.shape[0], -1)), "Gs"), (tf.maximum(self._choices, 0), "Gc")],
            "Gc",
            tuple(self._choices.shape),
            self._context.layout,
        )

    def _take(self, rows: tf.Tensor, indices: tf.Tensor) -> tf.Tensor:
        """The rows of `[G, n, M]` at `indices [G, m]`, zeros for NONE: `[G, m, M]`."""
        groups, _, model_dim = rows.shape
        gathered = _on_own_groups(
            lambda rows, indices: tf.gather(rows, indices, axis=1, batch_dims=1),
            [(rows, "GsM"), (tf.maximum(indices, 0), "Gs")],
            "GsM",
            (groups, indices.shape[1], model_dim),
            self._context.layout,
        )
        return tf.where(tf.equal(indices, NONE)[..., None], tf.zeros((), rows.dtype), gathered)


# The values of `model.dispatch` beside AUTO.
DISPATCHES = {"einsum": Einsum, "gather": Gather}
AUTO = "auto"
# Tokens of a group: below this number, a CPU's matmuls with a one-hot tensor take less time than looking up rows.
_GATHER_FROM = 128


def check_dispatch(name: str):
    """Raises UserError unless `name` is AUTO or one of DISPATCHES."""
    if name not in (names := (AUTO, *DISPATCHES)):
        raise UserError(f"dispatch is {name!r}; use one of {', '.join(names)}.{did_you_mean(name, names)}")


def choose(name: str, tokens: tf.Tensor, context: Context) -> Callable[..., Einsum | Gather]:
    """The dispatch of that name for groups of `tokens [G, S, M]`.

    AUTO is gather for large groups on a CPU, for which most of a one-hot matmul is zeros, wherever devices divide the
    groups and M; otherwise einsum, which matrix units do nearly for nothing, and which pipeline stages can vectorise.
    """
    if name != AUTO:
        return DISPATCHES[name]
    groups, size, model_dim = tokens.shape
    layout = context.layout
    if layout.outer_axes:
        return Einsum
    divisible = groups % layout.num_shards("GSM", "G") == 0 == model_dim % layout.num_shards("GSM", "M")
    return Gather if context.platform == "cpu" and size >= _GATHER_FROM and divisible else Einsum


def choices_of(positions: tf.Tensor, num_positions: int) -> tf.Tensor:
    """The choice at each position, from the position of each choice: `[G, K * S]` to `[G, E * C]`, NONE where empty."""
    groups, choices = positions.shape
    across_groups = tf.where(tf.equal(positions, NONE), NONE, positions + num_positions * tf.range(groups)[:, None])
    # No two choices share a position, so at most one term of every sum is not zero. Negative indices are ignored.
    ordinals = tf.broadcast_to(tf.range(choices) + 1, positions.shape)
    filled = tf.math.unsorted_segment_sum(ordinals, across_groups, groups * num_positions)
    return tf.reshape(filled, (groups, num_positions)) - 1


def _on_own_groups(
    function: Callable[..., tf.Tensor],
    arguments: Sequence[tuple[tf.Tensor, str]],
    logical_axes: str,
    shape: tuple[int, ...],
    layout: Layout,
) -> tf.Tensor:
    """Applies `function` on each device to its own groups, and to its part of M where M is sharded.

    Args:
      function: of tensors with a device's shapes.
      arguments: tensors of full shapes and their logical axes.
      logical_axes: of the result.
      shape: of the result.
      layout: where it does not shard G, `function` is applied to the complete tensors.

    Raises:
      UserError: the number of devices does not divide the groups, or M.
    """
    tensors = [tensor for tensor, _ in arguments]
    if layout.num_shards("G", "G") == 1 or tf.executing_eagerly():
        return function(*tensors)
    _check_divisible(shape, logical_axes, layout)
    devices = layout.mesh.devices
    own = [
        spmd.auto_to_manual_spmd_partition(tensor, devices, layout.dims_mapping(names)) for tensor, names in arguments
    ]
    return spmd.manual_to_auto_spmd_partition(function(*own), devices, layout.dims_mapping(logical_axes), shape)


def _check_divisible(shape: tuple[int, ...], logical_axes: str, layout: Layout):
    for size, axis in zip(shape, logical_axes):
        shards = layout.num_shards(logical_axes, axis)
        if size % shards:
            what, remedy = {
                "G": (f"the {size} groups of this batch", "num_groups and the tokens of a batch multiples"),
                "M": (f"model_dim={size}", "it a multiple"),
            }[axis]
            raise UserError(
                f"dispatch=gather needs equal parts on all devices, but {shards} devices do not divide {what}. "
                f"Make {remedy} of {shards}, or set dispatch=einsum."
            )
