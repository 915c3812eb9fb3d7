"""Gradients of a pipeline's weights, added up over its iterations.

Devices that divide the rows of a microbatch have a part of each gradient. Where layers compute rows independently, the
parts are differentiated separately, as terms of a partial value (`sharding.partial`; Yuan et al. 2021): the loop
carries the terms, and one reduction follows it, instead of one in every iteration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from lingvo_moe import tree
from lingvo_moe.layers.base import Context
from lingvo_moe.layers.pipeline_schedule import Iteration
from lingvo_moe.layers.stage_buffers import StageBuffers, select
from lingvo_moe.lazy import tf
from lingvo_moe.ops.random_numbers import Rows
from lingvo_moe.ops.vectorize import vectorize
from lingvo_moe.sharding.layout import UNREDUCED, Layout
from lingvo_moe.sharding.partial import Partial, reduce


@dataclasses.dataclass(frozen=True)
class RowParts:
    """The parts into which the devices along a mesh axis divide the rows of a microbatch.

    Attributes:
      mesh_axis: of the devices.
      count: U, the number of parts.
      rows: of a microbatch, a multiple of U.
    """

    mesh_axis: str
    count: int
    rows: int

    @staticmethod
    def of(layout: Layout, rows: int, weights: dict) -> RowParts | None:
        """Returns the parts of microbatches of `rows` rows.

        None if the layout does not divide the rows, or unequally, or divides a weight among the same devices; `weights`
        is the tree of stacked `Weight`s.
        """
        (mesh_axis,) = layout.mesh_axes("B")
        if mesh_axis is None or rows % layout.mesh.axis_size(mesh_axis):
            return None
        if any(mesh_axis in layout.mesh_axes(weight.logical_axes) for weight in tree.flatten(weights).values()):
            return None
        return RowParts(mesh_axis, layout.mesh.axis_size(mesh_axis), rows)

    def context(self, context: Context, part: tf.Tensor) -> Context:
        """The context of a call that sees the rows of part number `part`, a scalar, instead of all."""
        layout = context.layout.unreduced(self.mesh_axis)
        layout = dataclasses.replace(layout, outer_axes=layout.outer_axes + UNREDUCED)
        rows = Rows(part * (self.rows // self.count), self.rows)
        return dataclasses.replace(context, layout=layout, rows=rows)

    def map(self, function: Callable[..., list[tf.Tensor]], arguments: tuple) -> list[tf.Tensor]:
        """Applies `function` to each part at once.

        Args:
          function: from the number of a part, and trees of tensors `[B / U, ...]`, to a list of tensors.
          arguments: trees of tensors `[B, ...]`.

        Returns:
          The results, each `[U, ...]`.

        Raises:
          UserError: an operator inside `function` has no vectorised form.
        """
        return vectorize(function, (tf.range(self.count), *tf.nest.map_structure(self._divide, arguments)))

    def join(self, tensor: tf.Tensor) -> tf.Tensor:
        """`[U, B / U, ...]` to `[B, ...]`."""
        return tf.reshape(tensor, (self.rows, *tensor.shape[2:]))

    def _divide(self, tensor: tf.Tensor) -> tf.Tensor:
        """Inverts `join`. The result has no annotation: XLA propagates the sharding through the reshape."""
        return tf.reshape(tensor, (self.count, self.rows // self.count, *tensor.shape[1:]))


@dataclasses.dataclass(frozen=True)
class WeightGradients:
    """The sums of the gradients of all weights, stacked by stage.

    Attributes:
      buffers: of the pipeline.
      weight_axes: the logical axes of the stored weights.
      parts: of the rows, if the gradients are partial; the sums have a dimension U after their repeats then.
    """

    buffers: StageBuffers
    weight_axes: Sequence[str]
    parts: RowParts | None

    def zeros(self, theta: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The sums before the first iteration, from the weights by stage `[P, repeats, ...]`."""
        buffers, count = self._terms, [self.parts.count] if self.parts else []
        return [
            buffers.annotate(tf.zeros((*weight.shape[:2], *count, *weight.shape[2:]), weight.dtype), axes)
            for weight, axes in zip(theta, map(buffers.stage_weight_axes, self._axes))
        ]

    def add(
        self, totals: Sequence[tf.Tensor], iteration: Iteration, j: tf.Tensor, gradients: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Adds the gradients of an iteration's repeat j, `[P, ...]` or `[P, U, ...]`, of the stages that compute it."""
        active = iteration.active(j)
        return [
            self._terms.add_to_stage_weight(total, iteration, j, select(active, part, 0), axes)
            for total, part, axes in zip(totals, gradients, self._axes, strict=True)
        ]

    def reduced(self, totals: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The complete sums, `[P, repeats, ...]`."""
        if self.parts is None:
            return list(totals)
        layout = self.buffers.context.layout
        axes_by_stage = [self.buffers.stage_weight_axes(axes) for axes in self.weight_axes]
        return [
            reduce(
                Partial(
                    tf.transpose(total, [2, 0, 1, *range(3, total.shape.rank)]),
                    self.buffers.stage_axis + axes,
                    self.parts.mesh_axis,
                    layout,
                )
            )
            for total, axes in zip(totals, axes_by_stage, strict=True)
        ]

    @property
    def _axes(self) -> list[str]:
        """The logical axes of the sums, with the repeats first."""
        return [axes[0] + UNREDUCED * bool(self.parts) + axes[1:] for axes in self.weight_axes]

    @property
    def _terms(self) -> StageBuffers:
        """The buffers of the sums, which shard U."""
        if self.parts is None:
            return self.buffers
        context = self.buffers.context
        unreduced = dataclasses.replace(context, layout=context.layout.unreduced(self.parts.mesh_axis))
        return dataclasses.replace(self.buffers, context=unreduced)
